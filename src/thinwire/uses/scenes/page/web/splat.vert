// A corner of the quadrilateral around one splat's ellipse, as view/project.py finds it.
precision highp float;
precision highp int;
precision highp sampler2D;
precision highp usampler2D;

uniform sampler2D shapes, colours;
uniform usampler2D order;
uniform int first, end;  // of the order, which are drawn
uniform vec3 place;
uniform mat3 turn;  // its rows are right, down and forward
uniform vec2 size;
uniform float focal, near, larger;
flat out vec2 centre;
flat out vec3 form;  // a, b, c of a dx^2 + 2 b dx dy + c dy^2
flat out vec4 paint;  // colour and opacity
flat out float limit;

int which;

vec4 texel(sampler2D from, int each, int i) {
  int at = which * each + i, width = textureSize(from, 0).x;
  return texelFetch(from, ivec2(at % width, at / width), 0);
}

vec3 coefficient(int i) { return texel(colours, 1 + COEFFICIENTS, i).rgb; }

mat3 rotation(vec4 q) {
  float x = q.x, y = q.y, z = q.z, w = q.w;
  return mat3(1.0 - 2.0 * (y * y + z * z), 2.0 * (x * y + w * z), 2.0 * (x * z - w * y),
              2.0 * (x * y - w * z), 1.0 - 2.0 * (x * x + z * z), 2.0 * (y * z + w * x),
              2.0 * (x * z + w * y), 2.0 * (y * z - w * x), 1.0 - 2.0 * (x * x + y * y));
}

// The colour from a direction, by real spherical harmonics as in view/harmonics.py.
vec3 shaded(vec3 direction) {
  vec3 total = vec3(0.5) + 0.28209479 * coefficient(0);
#if COEFFICIENTS > 0
  float x = direction.x, y = direction.y, z = direction.z;
  total += 0.48860251 * (-y * coefficient(1) + z * coefficient(2) - x * coefficient(3));
#endif
#if COEFFICIENTS > 3
  float xx = x * x, yy = y * y, zz = z * z;
  total += 1.09254843 * (x * y * coefficient(4) - y * z * coefficient(5) - x * z * coefficient(7));
  total += 0.31539157 * (2.0 * zz - xx - yy) * coefficient(6) + 0.54627421 * (xx - yy) * coefficient(8);
#endif
#if COEFFICIENTS > 8
  float far = 4.0 * zz - xx - yy;
  total -= 0.59004359 * (y * (3.0 * xx - yy) * coefficient(9) + x * (xx - 3.0 * yy) * coefficient(15));
  total += 2.89061144 * x * y * z * coefficient(10) + 1.44530572 * z * (xx - yy) * coefficient(14);
  total -= 0.45704580 * far * (y * coefficient(11) + x * coefficient(13));
  total += 0.37317633 * z * (2.0 * zz - 3.0 * xx - 3.0 * yy) * coefficient(12);
#endif
  return max(total, 0.0);
}

void main() {
  gl_Position = vec4(2.0, 2.0, 0.0, 1.0);  // not in the picture
  int number = first + gl_InstanceID * EACH + (gl_VertexID >> 2), width = textureSize(order, 0).x;
  if (number >= end) return;
  which = int(texelFetch(order, ivec2(number % width, number / width), 0).r);
  vec4 own = texel(shapes, 3, 0);
  vec3 direction = own.xyz - place, at = turn * direction;
  limit = 2.0 * log(max(own.w / LEAST_ALPHA, 1.0));
  if (at.z <= near || limit <= 0.0) return;

  mat3 axes = rotation(texel(shapes, 3, 1));
  vec3 scales = larger * texel(shapes, 3, 2).xyz;
  mat3 seen = turn * mat3(axes[0] * scales.x, axes[1] * scales.y, axes[2] * scales.z);
  vec3 right = vec3(seen[0].x, seen[1].x, seen[2].x), down = vec3(seen[0].y, seen[1].y, seen[2].y);
  vec3 forward = vec3(seen[0].z, seen[1].z, seen[2].z);
  vec2 uv = at.xy / at.z, most = BEYOND * size / 2.0 / focal, middle = clamp(uv, -most, most);
  vec3 across = focal / at.z * (right - middle.x * forward);
  vec3 upright = focal / at.z * (down - middle.y * forward);
  float xx = dot(across, across) + WIDER, yy = dot(upright, upright) + WIDER, xy = dot(across, upright);
  form = vec3(yy, -xy, xx) / max(xx * yy - xy * xy, WIDER * WIDER);

  float mean = (xx + yy) / 2.0, apart = length(vec2((xx - yy) / 2.0, xy));
  vec2 longest = mean + apart - yy > abs(xy) ? vec2(mean + apart - yy, xy) : vec2(xy, mean + apart - xx);
  longest = apart > 0.0 ? normalize(longest) : vec2(1.0, 0.0);
  vec2 radii = sqrt(limit * vec2(mean + apart, max(mean - apart, WIDER)));
  vec2 corner = vec2(gl_VertexID & 1, (gl_VertexID >> 1) & 1) * 2.0 - 1.0;
  centre = focal * uv + size / 2.0;
  vec2 reach = sqrt(limit * vec2(xx, yy));  // beside and above the centre
  if (any(lessThan(centre + reach, vec2(0.0))) || any(greaterThan(centre - reach, size))) return;
  vec2 pixel = centre + corner.x * radii.x * longest + corner.y * radii.y * vec2(-longest.y, longest.x);
  paint = vec4(shaded(normalize(direction)), own.w);
  gl_Position = vec4(pixel / size * 2.0 - 1.0, 0.0, 1.0);
}
