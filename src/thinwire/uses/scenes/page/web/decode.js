// A worker that makes of a layer's text what the GPU takes. chunk.py writes what is read here.

async function inflated(text) {
  const raw = atob(text), packed = new Uint8Array(raw.length);
  for (let i = 0; i < raw.length; i++) packed[i] = raw.charCodeAt(i);
  const stream = new Blob([packed]).stream().pipeThrough(new DecompressionStream("deflate-raw"));
  return new Uint8Array(await new Response(stream).arrayBuffer());
}

// Channels one behind the other, each as planes of bytes, the lowest first.
function columnsOf(bytes, start, part) {
  let at = start;
  const columns = part.channels.map(([low, step, planes, differences]) => {
    const column = new Float32Array(part.count);
    for (let i = 0, code = 0; i < part.count; i++) {
      let read = 0;
      for (let k = planes - 1; k >= 0; k--) read = (read << 8) | bytes[at + k * part.count + i];
      code = differences ? code + ((read >>> 1) ^ -(read & 1)) : read;
      column[i] = low + step * code;
    }
    at += planes * part.count;
    return column;
  });
  return { columns, end: at };
}

// Colours [n, 1 + coefficients, 3] of columns along axes: the constant ones, then the others.
function coloursOf(columns, count, axes) {
  const width = columns.length, colours = new Float32Array(count * width);
  for (const [own, first, d] of [[axes.colours, 0, 3], [axes.harmonics, 3, width - 3]]) {
    for (let j = 0; j < d; j++) {
      for (let k = 0; k < d; k++) {
        const column = columns[first + k], factor = own[j * d + k];
        for (let i = 0, at = first + j; i < count; i++, at += width) colours[at] += factor * column[i];
      }
    }
  }
  return colours;
}

// Three texels a splat: position and alpha; rotation x, y, z, w; scales.
function shapesOf(columns, count) {
  const shapes = new Float32Array(12 * count);
  for (let i = 0, at = 0; i < count; i++, at += 12) {
    let square = 0;
    for (let k = 0; k < 3; k++) {
      shapes[at + k] = columns[k][i];
      shapes[at + 4 + k] = columns[6 + k][i];
      shapes[at + 8 + k] = Math.exp(columns[3 + k][i]);
      square += columns[6 + k][i] ** 2;
    }
    shapes[at + 3] = columns[9][i];
    shapes[at + 7] = Math.sqrt(Math.max(1 - square, 0));
  }
  return shapes;
}

function positionsOf(columns, count) {
  const positions = new Float32Array(3 * count);
  for (let k = 0; k < 3; k++) for (let i = 0; i < count; i++) positions[3 * i + k] = columns[k][i];
  return positions;
}

// How much of a picture each splat may cover: its alpha times what its two larger scales span.
function weightsOf(shapes, count) {
  const weights = new Float32Array(count);
  for (let i = 0, at = 0; i < count; i++, at += 12) {
    const x = shapes[at + 8], y = shapes[at + 9], z = shapes[at + 10];
    weights[i] = shapes[at + 3] * Math.max(x * y, y * z, x * z);
  }
  return weights;
}

onmessage = async ({ data: { parts, text, axes } }) => {
  try {
    const bytes = await inflated(text), found = [];
    const sizes = parts.flatMap((part) => part.channels.map(([, , planes]) => planes * part.count));
    const expected = sizes.reduce((sum, n) => sum + n, 0);
    if (bytes.length !== expected) throw new Error(`a damaged layer of ${bytes.length} bytes, expected ${expected}`);
    let at = 0;
    for (const part of parts) {
      const { columns, end } = columnsOf(bytes, at, part), n = part.count;
      const shapes = shapesOf(columns, n), positions = positionsOf(columns, n), weights = weightsOf(shapes, n);
      found.push({ shapes, positions, weights, colours: coloursOf(columns.slice(10), n, axes) });
      at = end;
    }
    postMessage(found, found.flatMap((part) => Object.values(part).map((array) => array.buffer)));
  } catch (e) {
    postMessage({ error: e.message });
  }
};
