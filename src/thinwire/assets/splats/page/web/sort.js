// A worker that puts splats in order, the farthest first: a counting sort by the bits of depths, 16 at a time.
const counts = new Uint32Array(65536);
let positions, depths, bits, which, half;

function room(most) {
  positions = new Float32Array(3 * most);
  depths = new Float32Array(most);
  bits = new Uint32Array(depths.buffer);  // those of numbers above 0 rise with them
  which = new Uint32Array(most);
  half = new Uint32Array(most);
}

// Keep the depths of splats that are not nearer than a camera draws, and say how many these are.
function measured({ place, forward, near, total }) {
  let n = 0;
  const [x, y, z] = place, [right, down, ahead] = forward;
  for (let i = 0, at = 0; i < total; i++, at += 3) {
    const depth = (positions[at] - x) * right + (positions[at + 1] - y) * down + (positions[at + 2] - z) * ahead;
    if (depth <= near) continue;
    depths[n] = depth;
    which[n++] = i;
  }
  return n;
}

// Turn counts to where each of their numbers begins.
function begin() {
  for (let i = 0, sum = 0; i < 65536; i++) {
    const own = counts[i];
    counts[i] = sum;
    sum += own;
  }
}

function sortInto(order, n) {
  counts.fill(0);
  for (let i = 0; i < n; i++) counts[bits[i] & 65535]++;
  begin();
  for (let i = 0; i < n; i++) half[counts[bits[i] & 65535]++] = i;
  counts.fill(0);
  for (let i = 0; i < n; i++) counts[bits[i] >>> 16]++;
  begin();
  for (let i = 0; i < n; i++) order[n - 1 - counts[bits[half[i]] >>> 16]++] = which[half[i]];
}

onmessage = ({ data }) => {
  if (data.most) room(data.most);
  else if (data.positions) positions.set(data.positions, 3 * data.first);
  else {
    const began = performance.now(), n = measured(data);
    sortInto(data.order, n);
    postMessage({ order: data.order, count: n, ms: performance.now() - began }, [data.order.buffer]);
  }
};
