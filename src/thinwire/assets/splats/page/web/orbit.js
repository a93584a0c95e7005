// A camera around the scene's middle, moved by mouse, touch and keys. It sees what view/cameras.py's look_at does.
class Orbit {
  constructor(canvas, changed) {
    this.place = new Float32Array(3);
    this.turn = new Float32Array(9);  // rows: right, down, forward
    this.changed = changed;
    this.pointers = new Map();
    this.home();
    canvas.addEventListener("pointerdown", (e) => {
      canvas.setPointerCapture(e.pointerId);
      this.pointers.set(e.pointerId, [e.clientX, e.clientY]);
    });
    canvas.addEventListener("pointermove", (e) => this.dragged(e, Math.min(canvas.clientWidth, canvas.clientHeight)));
    for (const end of ["pointerup", "pointercancel"]) {
      canvas.addEventListener(end, (e) => this.pointers.delete(e.pointerId));
    }
    canvas.addEventListener("wheel", (e) => {
      e.preventDefault();
      this.move(0, 0, Math.exp(Math.max(-100, Math.min(100, e.deltaY)) / 500));
    }, { passive: false });
    addEventListener("keydown", (e) => this.pressed(e));
    addEventListener("hashchange", () => this.home());
  }

  // Where the address says, as #azimuth,elevation,distance in degrees and shares of the first distance.
  home() {
    const given = location.hash.slice(1).split(",").map(Number);
    this.azimuth = Number.isFinite(given[0]) ? given[0] : 0;
    this.elevation = Number.isFinite(given[1]) ? given[1] : 10;
    this.distance = given[2] > 0 ? given[2] : 1;
    this.move(0, 0, 1);
  }

  move(azimuth, elevation, nearer) {
    this.azimuth = (this.azimuth + azimuth) % 360;
    this.elevation = Math.max(-89, Math.min(89, this.elevation + elevation));
    this.distance = Math.max(0.02, Math.min(20, this.distance * nearer));
    this.changed();
  }

  dragged(e, across) {
    const before = this.pointers.get(e.pointerId);
    if (!before) return;
    const [other] = [...this.pointers].filter(([id]) => id !== e.pointerId).map(([, at]) => at);
    const apart = (at) => Math.hypot(at[0] - other[0], at[1] - other[1]) || 1, now = [e.clientX, e.clientY];
    this.pointers.set(e.pointerId, now);
    if (other) this.move(0, 0, apart(before) / apart(now));
    else this.move((180 * (now[0] - before[0])) / across, (180 * (now[1] - before[1])) / across, 1);
  }

  pressed(e) {
    const step = { ArrowLeft: [5, 0, 1], ArrowRight: [-5, 0, 1], ArrowUp: [0, 5, 1], ArrowDown: [0, -5, 1],
      "+": [0, 0, 1 / 1.1], "=": [0, 0, 1 / 1.1], "-": [0, 0, 1.1] }[e.key];
    if (e.ctrlKey || e.metaKey || e.altKey || (!step && e.key !== "Home")) return;
    e.preventDefault();
    if (step) this.move(...step);
    else this.home();
  }

  // Set place, turn, focal and near for a picture of this size; its shorter side shows the whole frame.
  look(width, height) {
    const { middle, radius } = scene.frame, half = (scene.camera.angle * Math.PI) / 360;
    const a = (this.azimuth * Math.PI) / 180, e = (this.elevation * Math.PI) / 180;
    const x = Math.cos(e) * Math.sin(a), y = -Math.sin(e), z = Math.cos(e) * Math.cos(a);
    const distance = (this.distance * radius * scene.camera.margin) / Math.sin(half);
    const rx = -Math.cos(a), rz = Math.sin(a), { place, turn } = this;  // right has no height
    place[0] = middle[0] + x * distance;
    place[1] = middle[1] + y * distance;
    place[2] = middle[2] + z * distance;
    turn[0] = rx, turn[1] = 0, turn[2] = rz;
    turn[3] = -y * rz, turn[4] = x * rz - z * rx, turn[5] = y * rx;
    turn[6] = -x, turn[7] = -y, turn[8] = -z;
    this.focal = Math.min(width, height) / 2 / Math.tan(half);
    this.near = distance / 50;
  }
}
