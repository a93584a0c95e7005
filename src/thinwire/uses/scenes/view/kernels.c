/* The pass over all pixels that splats touch, front to back; native.py calls it.

   Nothing here checks its arguments: native.py does. */

#include "passes.h"
#include <math.h>

#pragma GCC diagnostic ignored "-Wpsabi" /* nothing here that has vectors for arguments is called from elsewhere */

enum { FIELDS = 11, LANES = 8 };
typedef float Floats __attribute__((vector_size(4 * LANES)));
typedef int32_t Ints __attribute__((vector_size(4 * LANES)));

/* a where the mask is set, b elsewhere. */
static inline __attribute__((always_inline)) Floats chosen(Ints mask, Floats a, Floats b)
{
    return (Floats)((mask & (Ints)a) | (~mask & (Ints)b));
}

static inline __attribute__((always_inline)) Floats least_of(Floats a, Floats b) { return chosen(a < b, a, b); }

/* e^x for x of -80 to 0, to 2e-7 of it: a power of two by its exponent, and the rest as a polynomial. */
static inline __attribute__((always_inline)) Floats exp_of(Floats x)
{
    const Floats y = x * 1.44269504f, whole = (y + 12582912.0f) - 12582912.0f, f = y - whole;
    const Floats high = 0.05550411f + f * (0.00961813f + f * (0.00133336f + f * 0.00015404f));
    const Floats p = 1.0f + f * (0.69314718f + f * (0.24022651f + f * high));
    return p * (Floats)((__builtin_convertvector(whole, Ints) + 127) << 23);
}

static inline __attribute__((always_inline)) Floats loaded(const float *from)
{
    Floats found;
    memcpy(&found, from, sizeof found);
    return found;
}

static inline __attribute__((always_inline)) void add(float *to, Floats more)
{
    const Floats sum = loaded(to) + more;
    memcpy(to, &sum, sizeof sum);
}

/* One row of one splat: its weights over n pixels, which colour the planes and take from what is let through. Add to
   sums the weights and their squares. Up to LANES - 1 pixels behind the row are touched, by weights of zero. */
static inline __attribute__((always_inline)) void blend(const float *about, float dy, float left, int32_t n, float least,
                                                        float *red, float *green, float *blue, float *through,
                                                        Floats *sums)
{
    const float a = about[2], b2 = 2.0f * about[3] * dy, c = about[4] * dy * dy, opacity = about[6];
    const Ints lane = {0, 1, 2, 3, 4, 5, 6, 7};
    const Floats none = {0}, most = none + 0.99f;
    for (int32_t j = 0; j < n; j += LANES) {
        const Floats dx = __builtin_convertvector(lane + j, Floats) + left;
        const Floats power = -0.5f * ((a * dx + b2) * dx + c), some = least_of(power, none);
        const Floats own = opacity * exp_of(chosen(some > -80.0f, some, none - 80.0f));
        const Floats t = loaded(through + j), w = least_of(own, most) * t;
        const Floats weight = chosen((lane + j < n) & (t >= least), w, none);
        add(red + j, weight * about[7]);
        add(green + j, weight * about[8]);
        add(blue + j, weight * about[9]);
        add(through + j, -weight);
        sums[0] += weight;
        sums[1] += weight * weight;
    }
}

/* How many pixels of a row that is dy below its middle a splat reaches, of so many; from is the first of them. */
static inline __attribute__((always_inline)) int64_t reached(const float *about, double dy, int64_t width, int64_t *from)
{
    const double x = about[0], a = about[2], b = about[3], c = about[4], limit = about[5], inverse = 1.0 / a;
    const double u = b * dy, rest = u * u - a * (c * dy * dy - limit);
    *from = 0;
    if (!(rest >= 0)) return 0;
    const double half = sqrt(rest), low = ceil(x + (-u - half) * inverse);
    const double high = floor(x + (-u + half) * inverse);
    *from = low > 0 ? (int64_t)low : 0;
    return (high < (double)(width - 1) ? (int64_t)high : width - 1) - *from + 1;
}

/* Splats in this order, FIELDS numbers each: centre x and y; a, b, c of the form a dx^2 + 2 b dx dy + c dy^2; its limit;
   opacity; red, green, blue; how far the limit reaches up and down. Planes of width x height: red, green, blue, and
   what is let through; room for LANES - 1 more behind the last. Set sums: of weights and of their squares, one of each a
   splat. Return how many pixels were touched. */
FAST int64_t tw_splat(const float *restrict splats, size_t count, int64_t width, int64_t height, float least,
                      float *restrict planes, double *restrict sums)
{
    int64_t touched = 0;
    for (size_t i = 0; i < count; i++) {
        const float *about = splats + i * FIELDS;
        const double x = about[0], y = about[1];
        Floats own[2] = {{0}};
        const double top = ceil(y - about[10]), bottom = floor(y + about[10]);
        const int64_t first = top > 0 ? (int64_t)top : 0, last = bottom < (double)(height - 1) ? (int64_t)bottom : height - 1;
        for (int64_t row = first; row <= last; row++) {
            const double dy = (double)row - y;
            int64_t from;
            const int64_t n = reached(about, dy, width, &from), at = row * width + from;
            if (n <= 0) continue;
            float *plane = planes + at;
            const int64_t size = width * height;
            blend(about, (float)dy, (float)((double)from - x), (int32_t)n, least, plane, plane + size,
                  plane + 2 * size, plane + 3 * size, own);
            touched += n;
        }
        for (size_t k = 0; k < LANES; k++) {
            sums[2 * i] += own[0][k];
            sums[2 * i + 1] += own[1][k];
        }
    }
    return touched;
}

/* One row of one splat, once more, now that the picture is known. Planes are n_pixels apart: what is still to come of
   red, green and blue; what is let through; how far the picture is off in red, green and blue. Add to sums what
   tw_back says. */
static inline __attribute__((always_inline)) void look_back(const float *about, float dy, float left, int32_t n, float least,
                                                            float *plane, int64_t size, Floats *sums)
{
    const float a = about[2], b2 = 2.0f * about[3] * dy, c = about[4] * dy * dy, opacity = about[6];
    const Ints lane = {0, 1, 2, 3, 4, 5, 6, 7};
    const Floats none = {0}, most = none + 0.99f;
    for (int32_t j = 0; j < n; j += LANES) {
        const Floats dx = __builtin_convertvector(lane + j, Floats) + left;
        const Floats power = -0.5f * ((a * dx + b2) * dx + c), some = least_of(power, none);
        const Floats own = opacity * exp_of(chosen(some > -80.0f, some, none - 80.0f));
        float *at = plane + j;
        const Floats t = loaded(at + 3 * size), w = least_of(own, most) * t;
        const Ints active = (lane + j < n) & (t >= least);
        const Floats weight = chosen(active, w, none), rest = t - weight, inverse = chosen(active, 1.0f / rest, none);
        Floats product = none, square = none;
        for (int k = 0; k < 3; k++) {
            const Floats behind = loaded(at + k * size) - weight * about[7 + k];
            const Floats off = chosen(active, loaded(at + (4 + k) * size), none);
            const Floats apart = about[7 + k] - behind * inverse;
            memcpy(at + k * size, &behind, sizeof behind);
            product += apart * off;
            square += apart * apart;
            sums[k] += weight * off;
        }
        memcpy(at + 3 * size, &rest, sizeof rest);
        product *= weight;
        sums[3] += weight * weight * square;
        sums[4] += product;
        const Floats moving = chosen(own < most, product, none);
        sums[5] += moving;
        sums[6] += moving * dx;
        sums[7] += moving * dx * dx;
    }
}

/* For splats as tw_splat draws them, on planes of width x height: the whole picture in red, green and blue; ones; and r,
   how far the picture is off in these three; room for LANES - 1 more behind the last. Behind a splat of colour c and
   weight w is a colour B. Set 11 sums over pixels a splat: of w r in red, green and blue; of w^2 |c - B|^2; of p, which is
   w r (c - B); and, where alpha is not cut, of p once more, and of p dx, p dy, p dx^2, p dx dy, p dy^2. */
FAST int64_t tw_back(const float *restrict splats, size_t count, int64_t width, int64_t height, float least,
                     float *restrict planes, double *restrict sums)
{
    int64_t touched = 0;
    for (size_t i = 0; i < count; i++) {
        const float *about = splats + i * FIELDS;
        double *found = sums + i * 11;
        const double x = about[0], y = about[1];
        const double top = ceil(y - about[10]), bottom = floor(y + about[10]);
        const int64_t first = top > 0 ? (int64_t)top : 0, last = bottom < (double)(height - 1) ? (int64_t)bottom : height - 1;
        for (int64_t row = first; row <= last; row++) {
            const double dy = (double)row - y;
            int64_t from;
            const int64_t n = reached(about, dy, width, &from), at = row * width + from;
            if (n <= 0) continue;
            Floats own[8] = {{0}};
            look_back(about, (float)dy, (float)((double)from - x), (int32_t)n, least, planes + at,
                      width * height, own);
            double total[8] = {0};
            for (size_t s = 0; s < 8; s++)
                for (size_t k = 0; k < LANES; k++) total[s] += own[s][k];
            for (size_t s = 0; s < 7; s++) found[s] += total[s];
            found[7] += total[5] * dy;
            found[8] += total[7];
            found[9] += total[6] * dy;
            found[10] += total[5] * dy * dy;
            touched += n;
        }
    }
    return touched;
}
