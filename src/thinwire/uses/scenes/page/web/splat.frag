// What one splat adds to a pixel, its colour times its alpha; rows of the picture go downwards.
precision highp float;

flat in vec2 centre;
flat in vec3 form;
flat in vec4 paint;
flat in float limit;
out vec4 added;

void main() {
  vec2 d = gl_FragCoord.xy - centre;
  float far = form.x * d.x * d.x + 2.0 * form.y * d.x * d.y + form.z * d.y * d.y;
  if (far > limit) discard;
  float alpha = min(paint.a * exp(-0.5 * max(far, 0.0)), MOST_ALPHA);
  added = vec4(paint.rgb * alpha, alpha);
}
