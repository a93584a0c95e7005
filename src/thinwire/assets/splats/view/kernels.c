/* The pass over all pixels that splats touch, front to back; native.py calls it.

   Nothing here checks its arguments: native.py does. */

#include "passes.h"
#include <math.h>

enum { FIELDS = 11, LANES = 8, WIDEST = 8192 };

/* e^x for x of -80 to 0, to 2e-7 of it: a power of two by its exponent, and the rest as a polynomial. */
static inline float exp_of(float x)
{
    const float y = x * 1.44269504f, whole = (y + 12582912.0f) - 12582912.0f, f = y - whole;
    const float p =
        1.0f + f * (0.69314718f + f * (0.24022651f + f * (0.05550411f + f * (0.00961813f + f * (0.00133336f + f * 0.00015404f)))));
    const int32_t bits = ((int32_t)whole + 127) << 23;
    float power;
    memcpy(&power, &bits, sizeof power);
    return p * power;
}

/* One row of one splat: its weights over n pixels, which colour the planes and take from what is let through. Add to
   sums the weights and their squares. */
static inline void blend(const float *restrict about, float dy, float left, int64_t n, float least, float *restrict red,
                         float *restrict green, float *restrict blue, float *restrict through, double *restrict sums)
{
    static _Thread_local float alpha[WIDEST + LANES];
    const float a = about[2], b2 = 2.0f * about[3] * dy, c = about[4] * dy * dy, opacity = about[6];
    const float r = about[7], g = about[8], b = about[9];
    for (int64_t j = 0; j < n; j++) {
        const float dx = (float)(int32_t)j + left, power = -0.5f * ((a * dx + b2) * dx + c);
        const float own = opacity * exp_of(power < 0.0f ? power : 0.0f);
        alpha[j] = own < 0.99f ? own : 0.99f;
    }
    float weights[LANES] = {0}, squares[LANES] = {0};
    int64_t j = 0;
    for (; j + LANES <= n; j += LANES)
        for (int64_t k = 0; k < LANES; k++) {
            const float t = through[j + k], w = t < least ? 0.0f : alpha[j + k] * t;
            red[j + k] += w * r;
            green[j + k] += w * g;
            blue[j + k] += w * b;
            through[j + k] = t - w;
            weights[k] += w;
            squares[k] += w * w;
        }
    for (; j < n; j++) {
        const float t = through[j], w = t < least ? 0.0f : alpha[j] * t;
        red[j] += w * r;
        green[j] += w * g;
        blue[j] += w * b;
        through[j] = t - w;
        weights[0] += w;
        squares[0] += w * w;
    }
    for (size_t k = 0; k < LANES; k++) {
        sums[0] += weights[k];
        sums[1] += squares[k];
    }
}

/* Splats in this order, FIELDS numbers each: centre x and y; a, b, c of the form a dx^2 + 2 b dx dy + c dy^2; its limit;
   opacity; red, green, blue; how far the limit reaches up and down. Planes of width x height: red, green, blue, and
   what is let through. Set sums: of weights and of their squares, one of each a splat. Return how many pixels were touched. */
FAST int64_t tw_splat(const float *restrict splats, size_t count, int64_t width, int64_t height, float least,
                      float *restrict planes, double *restrict sums)
{
    int64_t touched = 0;
    for (size_t i = 0; i < count; i++) {
        const float *about = splats + i * FIELDS;
        const double x = about[0], y = about[1], a = about[2], b = about[3], c = about[4], limit = about[5];
        const double top = ceil(y - about[10]), bottom = floor(y + about[10]);
        const int64_t first = top > 0 ? (int64_t)top : 0, last = bottom < (double)(height - 1) ? (int64_t)bottom : height - 1;
        for (int64_t row = first; row <= last; row++) {
            const double dy = (double)row - y, u = b * dy, rest = u * u - a * (c * dy * dy - limit);
            if (!(rest >= 0)) continue;
            const double half = sqrt(rest), low = ceil(x + (-u - half) / a), high = floor(x + (-u + half) / a);
            const int64_t from = low > 0 ? (int64_t)low : 0;
            const int64_t to = high < (double)(width - 1) ? (int64_t)high : width - 1, at = row * width + from;
            if (to < from) continue;
            float *plane = planes + at;
            const int64_t size = width * height;
            blend(about, (float)dy, (float)((double)from - x), to - from + 1, least, plane, plane + size,
                  plane + 2 * size, plane + 3 * size, sums + 2 * i);
            touched += to - from + 1;
        }
    }
    return touched;
}
