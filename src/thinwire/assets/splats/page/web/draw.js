// The scene on the GPU: attributes in textures, a quadrilateral a splat, and a picture of half floats.
class Drawing {
  constructor(canvas) {
    const gl = canvas.getContext("webgl2", { alpha: false, antialias: false, depth: false });
    if (!gl) throw new Error("this browser has no WebGL2, which the page draws with");
    this.gl = gl;
    const deep = gl.getExtension("EXT_color_buffer_float") || gl.getExtension("EXT_color_buffer_half_float");
    this.format = deep ? gl.RGBA16F : gl.RGBA8;
    const head = `#version 300 es\n${scene.defines}#define COEFFICIENTS ${scene.coefficients}\n`;
    this.splats = this.program(head, "splat", ["shapes", "colours", "place", "turn", "size", "focal", "near"]);
    this.screen = this.program(head, "screen", ["picture"]);
    this.width = Math.min(4096, gl.getParameter(gl.MAX_TEXTURE_SIZE));
    this.shapes = this.texture(gl.RGBA32F, 3);
    this.colours = this.texture(gl.RGB16F, 1 + scene.coefficients);
    this.picture = gl.createTexture();
    this.frame = gl.createFramebuffer();
    this.order = gl.createBuffer();
    this.count = 0;
    gl.bindBuffer(gl.ARRAY_BUFFER, this.order);
    gl.bufferData(gl.ARRAY_BUFFER, 4 * scene.most, gl.DYNAMIC_DRAW);
    gl.enableVertexAttribArray(0);
    gl.vertexAttribIPointer(0, 1, gl.UNSIGNED_INT, 0, 0);
    gl.vertexAttribDivisor(0, 1);
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
    this.write(this.shapes, this.gl.RGBA, 4, first * 3, shapes);
    this.write(this.colours, this.gl.RGB, 3, first * (1 + scene.coefficients), colours);
  }

  write(texture, format, numbers, first, data) {
    const gl = this.gl, texels = data.length / numbers;
    gl.bindTexture(gl.TEXTURE_2D, texture);
    for (let at = 0, run; at < texels; at += run) {
      const x = (first + at) % this.width, y = Math.floor((first + at) / this.width), left = texels - at;
      const rows = x ? 1 : Math.max(1, Math.floor(left / this.width)), wide = Math.min(this.width - x, left);
      run = wide * rows;
      const part = data.subarray(at * numbers, (at + run) * numbers);
      gl.texSubImage2D(gl.TEXTURE_2D, 0, x, y, wide, rows, format, gl.FLOAT, part);
    }
  }

  // Draw the first `count` of these splats from now on.
  setOrder(order, count) {
    this.gl.bufferSubData(this.gl.ARRAY_BUFFER, 0, order, 0, count);
    this.count = count;
  }

  resize(width, height) {
    const gl = this.gl;
    gl.canvas.width = width;
    gl.canvas.height = height;
    gl.bindTexture(gl.TEXTURE_2D, this.picture);
    const kind = this.format === gl.RGBA8 ? gl.UNSIGNED_BYTE : gl.HALF_FLOAT;
    gl.texImage2D(gl.TEXTURE_2D, 0, this.format, width, height, 0, gl.RGBA, kind, null);
    this.unfiltered();
    gl.bindFramebuffer(gl.FRAMEBUFFER, this.frame);
    gl.framebufferTexture2D(gl.FRAMEBUFFER, gl.COLOR_ATTACHMENT0, gl.TEXTURE_2D, this.picture, 0);
    gl.viewport(0, 0, width, height);
  }

  paint(camera) {
    const gl = this.gl, { at } = this.splats;
    gl.bindFramebuffer(gl.FRAMEBUFFER, this.frame);
    gl.clear(gl.COLOR_BUFFER_BIT);
    gl.useProgram(this.splats.program);
    gl.activeTexture(gl.TEXTURE1);
    gl.bindTexture(gl.TEXTURE_2D, this.colours);
    gl.activeTexture(gl.TEXTURE0);
    gl.bindTexture(gl.TEXTURE_2D, this.shapes);
    gl.uniform1i(at.colours, 1);
    gl.uniform3fv(at.place, camera.place);
    gl.uniformMatrix3fv(at.turn, true, camera.turn);
    gl.uniform2f(at.size, gl.canvas.width, gl.canvas.height);
    gl.uniform1f(at.focal, camera.focal);
    gl.uniform1f(at.near, camera.near);
    gl.enable(gl.BLEND);
    gl.drawArraysInstanced(gl.TRIANGLE_STRIP, 0, 4, this.count);
    gl.disable(gl.BLEND);
    gl.bindFramebuffer(gl.FRAMEBUFFER, null);
    gl.useProgram(this.screen.program);
    gl.bindTexture(gl.TEXTURE_2D, this.picture);
    gl.drawArrays(gl.TRIANGLES, 0, 3);
  }
}
