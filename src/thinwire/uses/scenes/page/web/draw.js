// The scene on the GPU: attributes in textures, a quadrilateral a splat, and a picture of half floats.
const EACH = 256;  // splats an instance: software draws instances one by one

class Drawing {
  constructor(canvas) {
    const gl = canvas.getContext("webgl2", { alpha: false, antialias: false, depth: false });
    if (!gl) throw new Error("this browser has no WebGL2, which the page draws with");
    this.gl = gl;
    const deep = gl.getExtension("EXT_color_buffer_float") || gl.getExtension("EXT_color_buffer_half_float");
    this.format = deep ? gl.RGBA16F : gl.RGBA8;
    const head = `#version 300 es\n${scene.defines}#define COEFFICIENTS ${scene.coefficients}\n#define EACH ${EACH}\n`;
    this.splats = this.program(head, "splat", ["shapes", "colours", "place", "turn", "size", "focal", "near", "larger", "order", "first", "end"]);
    this.screen = this.program(head, "screen", ["picture", "share"]);
    this.width = Math.min(4096, gl.getParameter(gl.MAX_TEXTURE_SIZE));
    this.shapes = this.texture(gl.RGBA32F, 3);
    this.colours = this.texture(gl.RGB16F, 1 + scene.coefficients);
    this.picture = gl.createTexture();
    this.frame = gl.createFramebuffer();
    this.order = this.texture(gl.R32UI, 1);
    this.count = 0;
    this.larger = 1;
    gl.bindBuffer(gl.ELEMENT_ARRAY_BUFFER, gl.createBuffer());
    const corners = new Uint16Array(6 * EACH).map((_, i) => 4 * Math.floor(i / 6) + [0, 1, 2, 2, 1, 3][i % 6]);
    gl.bufferData(gl.ELEMENT_ARRAY_BUFFER, corners, gl.STATIC_DRAW);
    gl.blendFunc(gl.ONE, gl.ONE_MINUS_SRC_ALPHA);
  }

  program(head, name, uniforms) {
    const gl = this.gl, program = gl.createProgram();
    for (const [type, end] of [[gl.VERTEX_SHADER, "vert"], [gl.FRAGMENT_SHADER, "frag"]]) {
      const shader = gl.createShader(type);
      gl.shaderSource(shader, head + document.getElementById(`${name}.${end}`).textContent);
      gl.compileShader(shader);
      gl.attachShader(program, shader);
      if (!gl.getShaderParameter(shader, gl.COMPILE_STATUS)) throw new Error(gl.getShaderInfoLog(shader));
    }
    gl.linkProgram(program);
    if (!gl.getProgramParameter(program, gl.LINK_STATUS)) throw new Error(gl.getProgramInfoLog(program));
    return { program, at: Object.fromEntries(uniforms.map((u) => [u, gl.getUniformLocation(program, u)])) };
  }

  // Room for `each` texels of every splat, in rows.
  texture(format, each) {
    const gl = this.gl, texture = gl.createTexture(), rows = Math.ceil((scene.most * each) / this.width);
    if (rows > gl.getParameter(gl.MAX_TEXTURE_SIZE)) throw new Error("more splats than this GPU has room for");
    gl.bindTexture(gl.TEXTURE_2D, texture);
    gl.texStorage2D(gl.TEXTURE_2D, 1, format, this.width, rows);
    this.unfiltered();
    return texture;
  }

  // Floats of 32 bits cannot be filtered, and a texture that should be reads as nothing.
  unfiltered() {
    for (const name of [this.gl.TEXTURE_MIN_FILTER, this.gl.TEXTURE_MAG_FILTER]) {
      this.gl.texParameteri(this.gl.TEXTURE_2D, name, this.gl.NEAREST);
    }
  }

  // Put attributes of splats from number `first` on in their textures.
  add(first, { shapes, colours }) {
    this.write(this.shapes, this.gl.RGBA, this.gl.FLOAT, 4, first * 3, shapes);
    this.write(this.colours, this.gl.RGB, this.gl.FLOAT, 3, first * (1 + scene.coefficients), colours);
  }

  write(texture, format, kind, numbers, first, data) {
    const gl = this.gl, texels = data.length / numbers;
    gl.bindTexture(gl.TEXTURE_2D, texture);
    for (let at = 0, run; at < texels; at += run) {
      const x = (first + at) % this.width, y = Math.floor((first + at) / this.width), left = texels - at;
      const rows = x ? 1 : Math.max(1, Math.floor(left / this.width)), wide = Math.min(this.width - x, left);
      run = wide * rows;
      const part = data.subarray(at * numbers, (at + run) * numbers);
      gl.texSubImage2D(gl.TEXTURE_2D, 0, x, y, wide, rows, format, kind, part);
    }
  }

  // Draw the first `count` of these splats from now on, so many times as large.
  setOrder(order, count, larger) {
    this.write(this.order, this.gl.RED_INTEGER, this.gl.UNSIGNED_INT, 1, 0, order.subarray(0, count));
    this.count = count;
    this.larger = larger;
  }

  resize(width, height) {
    const gl = this.gl;
    gl.canvas.width = width;
    gl.canvas.height = height;
    gl.bindTexture(gl.TEXTURE_2D, this.picture);
    const kind = this.format === gl.RGBA8 ? gl.UNSIGNED_BYTE : gl.HALF_FLOAT;
    gl.texImage2D(gl.TEXTURE_2D, 0, this.format, width, height, 0, gl.RGBA, kind, null);
    gl.texParameteri(gl.TEXTURE_2D, gl.TEXTURE_MIN_FILTER, gl.LINEAR);
    for (const name of [gl.TEXTURE_WRAP_S, gl.TEXTURE_WRAP_T]) gl.texParameteri(gl.TEXTURE_2D, name, gl.CLAMP_TO_EDGE);
    gl.bindFramebuffer(gl.FRAMEBUFFER, this.frame);
    gl.framebufferTexture2D(gl.FRAMEBUFFER, gl.COLOR_ATTACHMENT0, gl.TEXTURE_2D, this.picture, 0);
  }

  // Begin a picture, on a share of the width and of the height.
  begin(camera, share) {
    const gl = this.gl, { at, program } = this.splats;
    this.size = [gl.canvas.width, gl.canvas.height].map((side) => Math.max(1, Math.round(side * share)));
    gl.bindFramebuffer(gl.FRAMEBUFFER, this.frame);
    gl.clear(gl.COLOR_BUFFER_BIT);
    gl.useProgram(program);
    gl.uniform1i(at.colours, 1);
    gl.uniform1i(at.order, 2);
    gl.uniform3fv(at.place, camera.place);
    gl.uniformMatrix3fv(at.turn, true, camera.turn);
    gl.uniform2f(at.size, ...this.size);
    gl.uniform1f(at.focal, camera.focal);
    gl.uniform1f(at.near, camera.near);
    gl.uniform1f(at.larger, this.larger);
  }

  // Draw so many splats of the order, from number `first` on, over what is there.
  draw(first, count) {
    const gl = this.gl;
    gl.bindFramebuffer(gl.FRAMEBUFFER, this.frame);
    gl.viewport(0, 0, ...this.size);
    gl.useProgram(this.splats.program);
    [this.shapes, this.colours, this.order].forEach((texture, i) => {
      gl.activeTexture(gl.TEXTURE0 + i);
      gl.bindTexture(gl.TEXTURE_2D, texture);
    });
    gl.activeTexture(gl.TEXTURE0);
    gl.uniform1i(this.splats.at.first, first);
    gl.uniform1i(this.splats.at.end, first + count);
    gl.enable(gl.BLEND);
    gl.drawElementsInstanced(gl.TRIANGLES, 6 * EACH, gl.UNSIGNED_SHORT, 0, Math.ceil(count / EACH));
    gl.disable(gl.BLEND);
  }

  // Put what was drawn on the screen.
  show() {
    const gl = this.gl, { at, program } = this.screen, { width, height } = gl.canvas;
    gl.bindFramebuffer(gl.FRAMEBUFFER, null);
    gl.viewport(0, 0, width, height);
    gl.useProgram(program);
    gl.uniform2f(at.share, this.size[0] / width, this.size[1] / height);
    gl.bindTexture(gl.TEXTURE_2D, this.picture);
    gl.drawArrays(gl.TRIANGLES, 0, 3);
  }

  // Return a promise of the milliseconds until all that was asked for is done.
  finished() {
    const gl = this.gl, began = performance.now(), sync = gl.fenceSync(gl.SYNC_GPU_COMMANDS_COMPLETE, 0);
    gl.flush();
    return new Promise((resolve) => {
      const look = () => {
        const waits = !gl.isContextLost() && gl.getSyncParameter(sync, gl.SYNC_STATUS) !== gl.SIGNALED;
        if (waits) return setTimeout(look, 1);
        gl.deleteSync(sync);
        resolve(performance.now() - began);
      };
      setTimeout(look);
    });
  }
}
