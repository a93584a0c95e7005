// The page: layers come in, are decoded, put in order and painted, one after the other.
const canvas = document.querySelector("canvas"), told = document.getElementById("status");
const page = { history: [], sortMs: 0, quick: false, failed: false, push, picture };  // what scripts of layers, and tests, call

const FRAME = 50, REST = 250;  // ms: of a frame while the camera moves; without a move, until all is drawn
const FEWEST = 4096;  // splats that stand for all, at least
const SMALLER = 0.5;  // of the sides, while splats are few

let drawing, orbit, decoder, sorter, last, stay = 0, total = 0;
let wanted = 0, sorting = null;  // the newest order asked for, and the promise of it
let stale = true;  // the textures hold other splats than those in order
let painting = null, again = false;  // the promise of pictures being painted, and whether one more is wanted
let piece = 16384;  // splats that this machine draws in about the time of a frame
let moving = false, resting = 0;  // whether the camera moves, and the timer that says when it rests
let whole = false;  // the screen shows all splats by this camera
let came = [], spare;
const asked = { place: null, forward: new Float32Array(3), near: 0, total: 0, most: 0, order: null };
const sized = new ResizeObserver(() => fit());
last = start().catch(failed);

function failed(error) {
  page.failed = true;
  told.textContent = `cannot show this scene: ${error.message}`;
  throw error;
}

async function start() {
  drawing = new Drawing(canvas);
  canvas.addEventListener("webglcontextlost", (e) => {
    e.preventDefault();  // so that it comes back
    told.textContent = "the GPU was lost; waiting for it";
  });
  canvas.addEventListener("webglcontextrestored", restored);
  for (const kind of ["pointerdown", "wheel", "keydown"]) {
    addEventListener(kind, () => document.getElementById("help").remove(), { once: true });
  }
  decoder = working("decode.js");
  sorter = working("sort.js");
  sorter.postMessage({ most: scene.most });
  spare = new Uint32Array(scene.most);
  orbit = new Orbit(canvas, moved);
  fit();
  sized.observe(canvas);
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
  const ratio = Math.min(devicePixelRatio || 1, 2), sides = [canvas.clientWidth, canvas.clientHeight];
  const [width, height] = sides.map((side) => Math.max(1, Math.round(side * ratio)));
  if (width !== canvas.width || height !== canvas.height) resize(width, height);
}

function resize(width, height) {
  drawing.resize(width, height);
  refresh();
}

// Before the next frame; where nobody looks there are none.
function frame() {
  return new Promise((resolve) => (document.hidden ? setTimeout(resolve, 100) : requestAnimationFrame(resolve)));
}

// The camera has moved: few splats will do until it rests.
function moved() {
  moving = true;
  clearTimeout(resting);
  resting = setTimeout(rest, REST);
  refresh();
}

function rest() {
  moving = false;
  if (!whole) refresh();
}

const few = () => moving && piece < total;

// Paint before the next frame, once however often this is called; the promise says when that is done.
function repaint() {
  again = true;
  whole = false;
  painting ??= paint().catch(failed);
  return painting;
}

async function paint() {
  while (again) {
    await frame();
    again = false;
    await pass();
  }
  painting = null;
}

// Paint a picture in pieces that take about a frame each, and give it up where another is wanted meanwhile.
async function pass() {
  const many = drawing.count, share = few() ? SMALLER : 1;
  if (stale || (few() && many > 2 * piece)) return;  // splats that are fewer will soon be in order
  orbit.look(Math.round(canvas.width * share), Math.round(canvas.height * share));
  drawing.begin(orbit, share);
  for (let first = 0, size; first < many || !first; first += size) {
    size = piece;
    drawing.draw(first, Math.min(size, Math.max(many - first, 0)));
    const done = first + size >= many, seen = document.hidden;
    if (done) drawing.show();
    if (!(done && page.quick)) learn(Math.min(size, many - first), await drawing.finished(), seen || document.hidden);
    if (again && !done) return;
    if (!done) progress(Math.min(1, (first + size) / many));
    if (done) break;
  }
  whole = share === 1 && drawing.complete && !again;
  if (page.history.length) tell();
}

// Let pieces have as many splats as take the time of a frame.
function learn(count, ms, hidden) {
  if (hidden || count < Math.min(piece, FEWEST)) return;
  page.quick = ms < FRAME / 2 && piece >= total;
  if (ms > FRAME) piece = Math.max(FEWEST, Math.round((piece * Math.max(FRAME / ms, 0.25))));
  else if (ms < FRAME / 2 && piece < scene.most) piece *= 2;
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
    asked.most = few() ? piece : total;
    asked.order = spare;
    const found = await sorter.ask(asked, [spare.buffer]);
    spare = found.order;
    page.sortMs = found.ms;
    drawing.setOrder(found.order, found.count, found.larger);
    drawing.complete = found.of === total;
    stale &&= done !== wanted;
    repaint();
  }
  sorting = null;
}

// Take the next layer: what the page's scripts call, in turn. The layer before it is painted first.
function push(parts, text) {
  came.push([parts, text]);
  take(parts, text);
}

function take(parts, text) {
  last = last.then(() => show(parts, text)).catch(failed);
}

async function show(parts, text) {
  const began = performance.now(), found = await decoder.ask({ parts, text, axes: scene.axes });
  total = stay;
  stale = true;
  parts.forEach((part, i) => {
    drawing.add(total, found[i]);
    const { positions, weights } = found[i];
    sorter.postMessage({ first: total, positions, weights }, [positions.buffer, weights.buffer]);
    total += part.count;
    if (part.stays) stay = total;
  });
  await refresh();
  await painting;
  page.history.push({ began, painted: performance.now(), drawn: drawing.count, nbytes: text.length });
  tell();
  await frame();  // the screen shows it
  await new Promise((resolve) => setTimeout(resolve));
}

// The GPU has come back with nothing in it.
function restored() {
  last = last.catch(() => null).then(() => {
    drawing = new Drawing(canvas);
    drawing.resize(canvas.width, canvas.height);
    page.history.length = stay = total = 0;
    stale = true;
  }).catch(failed);
  came.forEach(([parts, text]) => take(parts, text));
}

function tell() {
  if (page.failed) return;
  const nbytes = page.history.reduce((sum, layer) => sum + layer.nbytes, 0);
  const text = `${total.toLocaleString("en")} splats, ${nbytes.toLocaleString("en")} bytes`;
  const drawn = whole || drawing.complete ? "" : `, ${drawing.count.toLocaleString("en")} of them while it moves`;
  told.textContent = `layer ${page.history.length} of ${scene.layers}: ${text}${drawn}`;
}

function progress(share) {
  if (page.failed) return;
  const layer = Math.min(page.history.length + 1, scene.layers);
  const what = page.history.length < scene.layers ? `layer ${layer} of ${scene.layers}` : "all splats";
  told.textContent = `drawing ${what}: ${Math.floor(100 * share)} %`;
}

// Return the picture of a camera at these angles as a data URL of PNG, once all layers that came are shown. For
// tests: the window's size no longer counts.
async function picture(azimuth, elevation, size) {
  await last;
  sized.disconnect();
  orbit.home();
  orbit.azimuth = azimuth;
  orbit.elevation = elevation;
  orbit.distance = 1;
  clearTimeout(resting);
  moving = false;
  resize(size, size);
  await refresh();
  await painting;
  drawing.show();
  return canvas.toDataURL("image/png");
}
