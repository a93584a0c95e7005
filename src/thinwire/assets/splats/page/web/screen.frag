// The picture, its first row at the top.
precision highp float;
precision highp sampler2D;

uniform sampler2D picture;
out vec4 shown;

void main() {
  ivec2 at = ivec2(gl_FragCoord.xy);
  shown = vec4(texelFetch(picture, ivec2(at.x, textureSize(picture, 0).y - 1 - at.y), 0).rgb, 1.0);
}
