// A camera around a place, moved by mouse, touch and keys. At first it sees what view/cameras.py's look_at does.
class Orbit {
  constructor(canvas, changed) {
    this.canvas = canvas;
    this.place = new Float32Array(3);
    this.turn = new Float32Array(9);  // rows: right, down, forward
    this.changed = changed;
    this.pointers = new Map();
    this.home();
    canvas.addEventListener("pointerdown", (e) => {
      canvas.setPointerCapture(e.pointerId);
      this.pointers.set(e.pointerId, [e.clientX, e.clientY]);
      if (e.button) e.preventDefault();  // no scrolling by the middle button
    });
    canvas.addEventListener("pointermove", (e) => this.dragged(e));
    for (const end of ["pointerup", "pointercancel", "lostpointercapture"]) {
      canvas.addEventListener(end, (e) => this.pointers.delete(e.pointerId));
    }
    canvas.addEventListener("contextmenu", (e) => e.preventDefault());
    canvas.addEventListener("wheel", (e) => this.rolled(e), { passive: false });
    addEventListener("keydown", (e) => this.pressed(e));
    addEventListener("hashchange", () => this.home());
  }

  // Where the address says, as #azimuth,elevation,distance,x,y,z: degrees, shares of the first distance, and
  // radii from the scene's middle to the place that the camera turns around.
  home() {
    const given = location.hash.slice(1).split(",").map(Number), { middle, radius } = scene.frame;
    this.azimuth = Number.isFinite(given[0]) ? given[0] : 0;
    this.elevation = Number.isFinite(given[1]) ? given[1] : 10;
    this.distance = given[2] > 0 ? given[2] : 1;
    this.around = middle.map((x, k) => x + radius * (Number.isFinite(given[3 + k]) ? given[3 + k] : 0));
    this.move(0, 0, 1);
  }

  // Turn by degrees, and come nearer; who can come no nearer goes on, and takes along what it turns around.
  move(azimuth, elevation, nearer) {
    this.azimuth = (this.azimuth + azimuth) % 360;
    this.elevation = Math.max(-89, Math.min(89, this.elevation + elevation));
    const wanted = this.distance * nearer;
    this.distance = Math.max(0.02, Math.min(20, wanted));
    if (wanted < this.distance) this.go(this.axes().slice(6), (this.distance - wanted) * this.length());
    this.changed();
  }

  // Move sideways and upright, so that what is in the middle follows by these shares of the shorter side.
  shift(across, down) {
    const turn = this.axes(), half = Math.tan((scene.camera.angle * Math.PI) / 360);
    const whole = 2 * half * this.length() * this.distance;
    this.go(turn.slice(0, 3), -across * whole);
    this.go(turn.slice(3, 6), -down * whole);
    this.changed();
  }

  go(direction, length) {
    const { middle, radius } = scene.frame;
    this.around = this.around.map((x, k) => {
      const off = x + direction[k] * length - middle[k];
      return middle[k] + Math.max(-20 * radius, Math.min(20 * radius, off));
    });
  }

  dragged(e) {
    const before = this.pointers.get(e.pointerId);
    if (!before) return;
    const [other] = [...this.pointers].filter(([id]) => id !== e.pointerId).map(([, at]) => at);
    const apart = (at) => Math.hypot(at[0] - other[0], at[1] - other[1]) || 1, now = [e.clientX, e.clientY];
    const side = Math.max(1, Math.min(this.canvas.clientWidth, this.canvas.clientHeight));
    const x = (now[0] - before[0]) / side, y = (now[1] - before[1]) / side;
    this.pointers.set(e.pointerId, now);
    if (other) {
      this.shift(x / 2, y / 2);  // as far as the middle of two fingers does
      this.move(0, 0, apart(before) / apart(now));
    } else if (e.buttons & 6 || e.shiftKey || e.ctrlKey || e.metaKey) this.shift(x, y);
    else this.move(180 * x, 180 * y, 1);
  }

  rolled(e) {
    e.preventDefault();
    const pixels = e.deltaY * [1, 16, 400][e.deltaMode] * (e.ctrlKey ? 5 : 1);  // a trackpad's pinch is fine
    this.move(0, 0, Math.exp(Math.max(-100, Math.min(100, pixels)) / 500));
  }

  pressed(e) {
    const arrow = { ArrowLeft: [1, 0], ArrowRight: [-1, 0], ArrowUp: [0, 1], ArrowDown: [0, -1] }[e.key];
    const nearer = { "+": 1 / 1.1, "=": 1 / 1.1, "-": 1.1, "_": 1.1 }[e.key];
    if (e.ctrlKey || e.metaKey || e.altKey || !(arrow || nearer || e.key === "Home")) return;
    e.preventDefault();
    if (nearer) this.move(0, 0, nearer);
    else if (!arrow) this.home();
    else if (e.shiftKey) this.move(5 * arrow[0], 5 * arrow[1], 1);
    else this.shift(arrow[0] / 20, arrow[1] / 20);
  }

  // Return right, down and forward, one behind the other.
  axes() {
    const a = (this.azimuth * Math.PI) / 180, e = (this.elevation * Math.PI) / 180;
    const x = Math.cos(e) * Math.sin(a), y = -Math.sin(e), z = Math.cos(e) * Math.cos(a);
    const rx = -Math.cos(a), rz = Math.sin(a);  // right has no height
    return [rx, 0, rz, -y * rz, x * rz - z * rx, y * rx, -x, -y, -z];
  }

  // Return how far off the camera is at first, which distances are shares of.
  length() {
    return (scene.frame.radius * scene.camera.margin) / Math.sin((scene.camera.angle * Math.PI) / 360);
  }

  // Set place, turn, focal and near for a picture of this size; its shorter side shows the whole frame at first.
  look(width, height) {
    const distance = this.distance * this.length();
    this.turn.set(this.axes());
    for (let k = 0; k < 3; k++) this.place[k] = this.around[k] - this.turn[6 + k] * distance;
    this.focal = Math.min(width, height) / 2 / Math.tan((scene.camera.angle * Math.PI) / 360);
    this.near = distance / 50;
  }
}
