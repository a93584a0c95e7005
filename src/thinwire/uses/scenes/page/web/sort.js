// A worker that puts splats in order, the farthest first: a counting sort by the bits of depths, 16 at a time.
const counts = new Uint32Array(65536);
let positions, weights, depths, bits, which, half, ranked, rankedOf = 0;

function room(most) {
  positions = new Float32Array(3 * most);
  weights = new Float32Array(most);
  ranked = new Uint32Array(most);
  depths = new Float32Array(most);
  bits = new Uint32Array(depths.buffer);  // those of numbers above 0 rise with them
  which = new Uint32Array(most);
  half = new Uint32Array(most);
}

// Put the splats of which few stand for all first: drawn by lot, by how much of a picture they may cover.
function rank(total) {
  if (rankedOf === total) return;
  for (let i = 0; i < total; i++) {
    const lot = (((i * 2654435761) >>> 0) + 0.5) / 4294967296;
    depths[i] = Math.max(weights[i], 1e-30) / -Math.log(lot);
    which[i] = i;
  }
  sortInto(ranked, total);
  rankedOf = total;
}

// Keep the depths of splats, or of the few that stand for all, that are not nearer than a camera draws, and say
// how many these are.
function measured({ place, forward, near, total, most }) {
  const few = most < total, many = few ? most : total;
  let n = 0;
  if (few) rank(total);
  const [x, y, z] = place, [right, down, ahead] = forward;
  for (let k = 0; k < many; k++) {
    const i = few ? ranked[k] : k, at = 3 * i;
    const depth = (positions[at] - x) * right + (positions[at + 1] - y) * down + (positions[at + 2] - z) * ahead;
    if (depth <= near) continue;
    depths[n] = depth;
    which[n++] = i;
  }
  return n;
}

// How much larger few splats have to be to cover what all do.
function larger({ total, most }) {
  if (most >= total) return 1;
  let all = 0, kept = 0;
  for (let k = 0; k < total; k++) {
    all += weights[ranked[k]];
    if (k < most) kept += weights[ranked[k]];
  }
  return kept > 0 ? Math.min(3, Math.sqrt(all / kept)) : 1;
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
  if (data.most && !data.order) room(data.most);
  else if (data.positions) {
    positions.set(data.positions, 3 * data.first);
    weights.set(data.weights, data.first);
    rankedOf = 0;
  } else {
    const began = performance.now(), n = measured(data);
    sortInto(data.order, n);
    const found = { order: data.order, count: n, larger: larger(data), of: Math.min(data.most, data.total) };
    postMessage({ ...found, ms: performance.now() - began }, [data.order.buffer]);
  }
};
