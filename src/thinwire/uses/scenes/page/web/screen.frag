// The picture, its first row at the top; it may lie in a corner of its texture.
precision highp float;
precision highp sampler2D;

uniform sampler2D picture;
uniform vec2 share;  // of the texture's width and height
out vec4 shown;

void main() {
  vec2 size = vec2(textureSize(picture, 0)), at = vec2(gl_FragCoord.x, size.y - gl_FragCoord.y) * share;
  shown = vec4(texture(picture, clamp(at, vec2(0.5), share * size - 0.5) / size).rgb, 1.0);
}
