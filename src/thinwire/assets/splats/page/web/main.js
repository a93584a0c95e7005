// The page: layers come in, are decoded, put in order and painted, one after the other.
const canvas = document.querySelector("canvas"), told = document.getElementById("status");
const page = { history: [], sortMs: 0, push, picture };  // what scripts of layers, and tests, call

let drawing, orbit, decoder, sorter, last, stay = 0, total = 0;
let wanted = 0, sorting = null;  // the newest order asked for, and the promise of it
let stale = true;  // the textures hold other splats than those in order
let waiting = false, spare;
const asked = { place: null, forward: new Float32Array(3), near: 0, total: 0, order: null };
last = start().catch(failed);

function failed(error) {
  told.textContent = `cannot show this scene: ${error.message}`;
  throw error;
}

async function start() {
  drawing = new Drawing(canvas);
  canvas.addEventListener("webglcontextlost", () => { told.textContent = "the GPU was lost; load the page again"; });
  decoder = working("decode.js");
  sorter = working("sort.js");
  sorter.postMessage({ most: scene.most });
  spare = new Uint32Array(scene.most);
  orbit = new Orbit(canvas, refresh);
  fit();
  addEventListener("resize", fit);
}

// Return a worker that runs one of the page's scripts, and is asked one thing at a time.
function working(id) {
  const worker = new Worker(URL.createObjectURL(new Blob([document.getElementById(id).textContent])));
  worker.ask = (message, moved) => new Promise((resolve, reject) => {
    worker.onmessage = ({ data }) => (data.error ? reject(new Error(data.error)) : resolve(data));
    worker.onerror = (e) => reject(new Error(e.message));
    worker.postMessage(message, moved);
  });
  return worker;
}

function fit() {
  const ratio = Math.min(devicePixelRatio || 1, 2);
  resize(Math.max(1, Math.round(innerWidth * ratio)), Math.max(1, Math.round(innerHeight * ratio)));
}

function resize(width, height) {
  drawing.resize(width, height);
  refresh();
}

function paint() {
  waiting = false;
  if (stale) return;
  orbit.look(canvas.width, canvas.height);
  drawing.paint(orbit);
}

// Paint before the next frame, once however often this is called.
function repaint() {
  if (!waiting) requestAnimationFrame(() => waiting && paint());
  waiting = true;
}

// Paint soon, and again when splats are in order for this camera, which the promise says.
function refresh() {
  wanted++;
  repaint();
  sorting ??= total ? sort().catch(failed) : null;
  return sorting;
}

async function sort() {
  for (let done = -1; done !== wanted;) {
    done = wanted;
    orbit.look(canvas.width, canvas.height);
    asked.place = orbit.place;
    asked.forward.set(orbit.turn.subarray(6));
    asked.near = orbit.near;
    asked.total = total;
    asked.order = spare;
    const found = await sorter.ask(asked, [spare.buffer]);
    spare = found.order;
    page.sortMs = found.ms;
    drawing.setOrder(found.order, found.count);
    stale &&= done !== wanted;
    repaint();
  }
  sorting = null;
}

// Take the next layer: what the page's scripts call, in turn. The layer before it is painted first.
function push(parts, text) {
  last = last.then(() => show(parts, text)).catch(failed);
}

async function show(parts, text) {
  const began = performance.now(), found = await decoder.ask({ parts, text, axes: scene.axes });
  total = stay;
  stale = true;
  parts.forEach((part, i) => {
    drawing.add(total, found[i]);
    sorter.postMessage({ first: total, positions: found[i].positions }, [found[i].positions.buffer]);
    total += part.count;
    if (part.stays) stay = total;
  });
  await refresh();
  paint();
  page.history.push({ began, painted: performance.now(), drawn: drawing.count, nbytes: text.length });
  tell();
  await new Promise((resolve) => requestAnimationFrame(() => setTimeout(resolve)));  // the screen shows it
}

function tell() {
  const nbytes = page.history.reduce((sum, layer) => sum + layer.nbytes, 0);
  const text = `${total.toLocaleString("en")} splats, ${nbytes.toLocaleString("en")} bytes`;
  told.textContent = `layer ${page.history.length} of ${scene.layers}: ${text}`;
}

// Return the picture of a camera at these angles as a data URL of PNG, once all layers that came are shown. For
// tests: the window's size no longer counts.
async function picture(azimuth, elevation, size) {
  await last;
  removeEventListener("resize", fit);
  orbit.azimuth = azimuth;
  orbit.elevation = elevation;
  orbit.distance = 1;
  resize(size, size);
  await refresh();
  paint();
  return canvas.toDataURL("image/png");
}
