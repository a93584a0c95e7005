/* The passes of DeadZone, of Uniform and of RankOne over all values of a tensor, each in one go; native.py calls them.

   Where no compiler was at hand, torch does the same in a dozen passes, to the same bits: so multiplications
   and additions must not be fused (setup.py says so to the compiler).

   Nothing here checks its arguments: native.py does. */

#include "passes.h"

enum { CHUNK = 2048, LARGE = 3, PLANES = 4, TABLE = 1 << 16 };

static inline int32_t as_bits(float value)
{
    int32_t bits;
    memcpy(&bits, &value, sizeof bits);
    return bits;
}

static inline float as_float(int32_t bits)
{
    float value;
    memcpy(&value, &bits, sizeof value);
    return value;
}

/* One bit for each of LOOK codes that is LARGE. */
static inline uint64_t large(const uint8_t *codes)
{
    uint64_t bits = 0;
#ifdef __SSE2__
    for (size_t g = 0; g < LOOK / 16; g++) {
        const __m128i some = _mm_loadu_si128((const __m128i *)(codes + 16 * g));
        bits |= (uint64_t)(uint32_t)_mm_movemask_epi8(_mm_cmpeq_epi8(some, _mm_set1_epi8(LARGE))) << 16 * g;
    }
#else
    for (size_t j = 0; j < LOOK; j++) bits |= (uint64_t)(codes[j] == LARGE) << j;
#endif
    return bits;
}

/* Where LARGE is among chunk codes, at most CHUNK of them, with zeros behind up to a multiple of LOOK; room for 4
   more than there are. */
static inline size_t larges(const uint8_t *codes, size_t chunk, uint16_t *at)
{
    size_t found = 0;
    for (size_t base = 0; base < chunk; base += LOOK) found += listed(large(codes + base), base, at + found);
    return found;
}

/* Levels of n values: values that they stand for, codes of two bits, a byte each (-1, 0, 1 as 0, 1, 2; LARGE for
   all others), and these others as zigzag numbers, in order. Return how many others there are. No level is beyond
   15 bits: the step is chosen so. */
FAST int64_t tw_levels(const float *x, size_t n, float inverse, float offset, float step, float *values,
                       uint8_t *restrict codes, uint16_t *restrict numbers)
{
    size_t found = 0;
    for (size_t i = 0; i < n; i += CHUNK) {
        const size_t here = n - i < CHUNK ? n - i : CHUNK;
        int16_t levels[CHUNK];
        uint8_t own[CHUNK] = {0};
        uint16_t at[CHUNK + 4];
        for (size_t j = 0; j < here; j++) {
            float y = x[i + j] * inverse;
            y += __builtin_copysignf(offset, y);
            levels[j] = (int16_t)(int32_t)y;
        }
        for (size_t j = 0; j < here; j++) values[i + j] = (float)levels[j] * step; /* perhaps where x was */
        for (size_t j = 0; j < here; j++) {
            const uint16_t code = (uint16_t)(levels[j] + 1);
            own[j] = (uint8_t)(code < LARGE ? code : LARGE);
        }
        memcpy(codes + i, own, here);
        const size_t count = larges(own, here, at);
        for (size_t j = 0; j < count; j++) {
            const int32_t level = levels[at[j]];
            numbers[found + j] = (uint16_t)(level * 2 ^ -(level < 0));
        }
        found += count;
    }
    return (int64_t)found;
}

/* n codes in PLANES runs of m, the last ones short or empty, a code of each run to a byte (see bits.py). */
FAST void tw_pack(const uint8_t *codes, size_t n, uint8_t *packed)
{
    const size_t m = (n + PLANES - 1) / PLANES, whole = n > (PLANES - 1) * m ? n - (PLANES - 1) * m : 0;
    for (size_t i = 0; i < whole; i++)
        packed[i] = (uint8_t)(codes[i] | codes[m + i] << 2 | codes[2 * m + i] << 4 | codes[3 * m + i] << 6);
    for (size_t i = whole; i < m; i++) {
        packed[i] = 0;
        for (size_t k = 0; k < PLANES && k * m + i < n; k++) packed[i] |= (uint8_t)(codes[k * m + i] << 2 * k);
    }
}

/* The low bytes of numbers, then the high ones. */
FAST void tw_halves(const uint16_t *numbers, size_t n, uint8_t *bytes)
{
    for (size_t j = 0; j < n; j++) bytes[j] = (uint8_t)numbers[j];
    for (size_t j = 0; j < n; j++) bytes[n + j] = (uint8_t)(numbers[j] >> 8);
}

/* The values that n packed codes stand for, and others, given as the halves of count zigzag numbers. Return how
   many others the codes ask for, or -1 for more than count; where that is not count, values mean nothing. */
FAST int64_t tw_values(const uint8_t *restrict packed, size_t n, const uint8_t *restrict others, size_t count,
                       float step, float *restrict values)
{
    const size_t m = (n + PLANES - 1) / PLANES;
    size_t found = 0;
    for (size_t k = 0; k < PLANES && k * m < n; k++) {
        const size_t run = n - k * m < m ? n - k * m : m;
        for (size_t i = 0; i < run; i += CHUNK) {
            const size_t here = run - i < CHUNK ? run - i : CHUNK;
            float *to = values + k * m + i;
            uint8_t codes[CHUNK] = {0};
            uint16_t at[CHUNK + 4];
            for (size_t j = 0; j < here; j++) codes[j] = packed[i + j] >> 2 * k & 3;
            for (size_t j = 0; j < here; j++) to[j] = (float)(codes[j] - 1) * step;
            const size_t some = larges(codes, here, at);
            if (some > count - found) return -1;
            for (size_t j = 0; j < some; j++, found++) {
                const int32_t number = others[found] | others[count + found] << 8;
                to[at[j]] = (float)(number >> 1 ^ -(number & 1)) * step;
            }
        }
    }
    return (int64_t)found;
}

/* The hash of noise.py's mix_int. */
static inline uint64_t mixed(uint64_t z)
{
    z = (z ^ z >> 30) * UINT64_C(0xBF58476D1CE4E5B9);
    z = (z ^ z >> 27) * UINT64_C(0x94D049BB133111EB);
    return z ^ z >> 31;
}

/* n values and step times the noise of key beside them, which table holds twice over: noise.py's add_dither. */
FAST int64_t tw_dithered(const float *restrict x, size_t n, uint64_t key, const float *restrict table, float step,
                         float *restrict values)
{
    for (size_t i = 0; i < n; i += TABLE, key += UINT64_C(0x9E3779B97F4A7C15)) {
        const float *noise = table + mixed(key) % TABLE;
        const size_t here = n - i < TABLE ? n - i : TABLE;
        for (size_t j = 0; j < here; j++) values[i + j] = x[i + j] + noise[j] * step;
    }
    return 0;
}

/* Codes of rows of width values, each a number of its row's scales, from -top as 0 to top as 2 top; and the scales: share
   of the row's largest magnitude, rounded up to the upper half of a float32, within least and most. Return how many
   rows are done: fewer than there are where one holds a NaN or an infinity. */
FAST int64_t tw_quantised(const float *restrict x, size_t rows, size_t width, float share, float least, float most,
                          int32_t top, uint8_t *restrict codes, uint16_t *restrict scales)
{
    const float round = 0x1.8p23f + (float)top; /* added, it leaves the code in the low byte */
    for (size_t r = 0; r < rows; r++, x += width, codes += width) {
        int32_t peak = 0; /* magnitudes are ordered as their bits are */
        for (size_t j = 0; j < width; j++) {
            const int32_t size = as_bits(x[j]) & INT32_MAX;
            peak = size > peak ? size : peak;
        }
        if (peak >= 0x7F800000) return (int64_t)r;
        float step = as_float(peak) * share;
        step = step < least ? least : step > most ? most : step;
        scales[r] = (uint16_t)((as_bits(step) + 0xFFFF) >> 16);
        const float inverse = 1.0f / as_float((int32_t)scales[r] << 16);
        for (size_t j = 0; j < width; j++) {
            float y = x[j] * inverse;
            y = y > (float)top ? (float)top : y;
            y = y < (float)-top ? (float)-top : y;
            codes[j] = (uint8_t)as_bits(y + round);
        }
    }
    return (int64_t)rows;
}

/* What tw_quantised's codes stand for. Return how many rows are done: fewer where a scale is not within least and most. */
FAST int64_t tw_dequantised(const uint8_t *restrict codes, size_t rows, size_t width, const uint16_t *restrict scales,
                            float least, float most, int32_t top, float *restrict values)
{
    for (size_t r = 0; r < rows; r++, codes += width, values += width) {
        const float step = as_float((int32_t)((uint32_t)scales[r] << 16));
        if (!(step >= least && step <= most)) return (int64_t)r;
        for (size_t j = 0; j < width; j++) values[j] = (float)(int8_t)(uint8_t)(codes[j] - top) * step;
    }
    return (int64_t)rows;
}

/* Sums of magnitudes over rows and over columns of each matrix of rows by width: whole numbers, of the largest
   magnitude's power of two times 2^-20, with what is below one cut off; so no order of summation tells. Add to by_row
   and by_column, and write the biased exponent of that power. Return how many matrices are done: fewer than there are
   where one holds a NaN or an infinity. */
FAST int64_t tw_magnitudes(const float *restrict x, size_t matrices, size_t rows, size_t width,
                           int32_t *restrict exponents, int64_t *restrict by_row, int64_t *restrict by_column)
{
    for (size_t s = 0; s < matrices; s++, x += rows * width, by_row += rows, by_column += width) {
        int32_t peak = 0; /* magnitudes are ordered as their bits are */
        for (size_t i = 0; i < rows * width; i++) {
            const int32_t size = as_bits(x[i]) & INT32_MAX;
            peak = size > peak ? size : peak;
        }
        if (peak >= 0x7F800000) return (int64_t)s;
        exponents[s] = peak >> 23 > 27 ? peak >> 23 : 27; /* what is below 2^-100 counts for nothing */
        const float unit = as_float((274 - exponents[s]) << 23);
        /* a number has at most 21 bits, so the sum of CHUNK of them has 32 */
        for (size_t top = 0; top < rows; top += CHUNK)
            for (size_t left = 0; left < width; left += CHUNK) {
                const size_t high = rows - top < CHUNK ? rows - top : CHUNK;
                const size_t wide = width - left < CHUNK ? width - left : CHUNK;
                uint32_t column[CHUNK] = {0};
                for (size_t r = top; r < top + high; r++) {
                    const float *from = x + r * width + left;
                    uint32_t sum = 0;
                    for (size_t j = 0; j < wide; j++) {
                        const uint32_t size = (uint32_t)(int32_t)(as_float(as_bits(from[j]) & INT32_MAX) * unit);
                        column[j] += size;
                        sum += size;
                    }
                    by_row[r] += sum;
                }
                for (size_t j = 0; j < wide; j++) by_column[left + j] += column[j];
            }
    }
    return (int64_t)matrices;
}

/* Codes of values that are about a row's scale times a column's, from the lowest level up: a magnitude's level is how
   many edges times the scales it reaches. There are 0, 1, 3 or 7. */
FAST int64_t tw_levelled(const float *restrict x, size_t matrices, size_t rows, size_t width,
                         const float *restrict row, const float *restrict column, const float *restrict edges,
                         int32_t count, uint8_t *restrict codes)
{
    const int32_t half = count + 1;
    for (size_t r = 0; r < matrices * rows; r++, x += width, codes += width) {
        const float *scale = column + r / rows * width;
        memset(codes, 0, width);
        for (int32_t e = 0; e + 1 < count; e++) {
            const float far = row[r] * edges[e];
            for (size_t j = 0; j < width; j++)
                codes[j] = (uint8_t)(codes[j] + ((as_bits(x[j]) & INT32_MAX) >= as_bits(far * scale[j])));
        }
        const float last = count ? row[r] * edges[count - 1] : 0;
        for (size_t j = 0; j < width; j++) {
            const int32_t bits = as_bits(x[j]);
            const int32_t level = codes[j] + (count && (bits & INT32_MAX) >= as_bits(last * scale[j]));
            codes[j] = (uint8_t)(bits >= 0 ? half + level : half - 1 - level);
        }
    }
    return 0;
}

/* What tw_levelled's codes stand for, where the levels of the positive ones, 1 to 8 of them, are given. */
FAST int64_t tw_scaled(const uint8_t *restrict codes, size_t matrices, size_t rows, size_t width,
                       const float *restrict row, const float *restrict column, const float *restrict levels,
                       int32_t half, float *restrict values)
{
    float table[16];
    for (size_t r = 0; r < matrices * rows; r++, codes += width, values += width) {
        const float *scale = column + r / rows * width;
        for (int32_t k = 0; k < half; k++) {
            table[half + k] = row[r] * levels[k];
            table[half - 1 - k] = -table[half + k];
        }
        if (half == 1)
            for (size_t j = 0; j < width; j++)
                values[j] = as_float((int32_t)((uint32_t)(codes[j] ^ 1) << 31 | (uint32_t)as_bits(table[1] * scale[j])));
        else if (half == 2)
            for (size_t j = 0; j < width; j++) {
                const float size = (codes[j] == 0 || codes[j] == 3 ? table[3] : table[2]) * scale[j];
                values[j] = codes[j] >= 2 ? size : -size;
            }
        else
            for (size_t j = 0; j < width; j++) values[j] = table[codes[j] & (2 * half - 1)] * scale[j];
    }
    return 0;
}

#define SIGN (UINT64_C(1) << 63) /* a key is sent as if it were signed, from the lowest number up */
#define INSIDE static inline __attribute__((always_inline)) /* so that it is compiled for the same processor */

/* Codes of bits each to bytes: see bits.py. */
INSIDE void packed(const uint8_t *restrict codes, size_t n, size_t bits, uint8_t *restrict out)
{
    const size_t runs = bits % 2 ? 8 : bits % 4 ? 4 : 8 / bits, m = (n + runs - 1) / runs;
    memset(out, 0, m * (runs * bits / 8));
    for (size_t k = 0; k < runs && k * m < n; k++) {
        const size_t here = n - k * m < m ? n - k * m : m, shift = k * bits % 8;
        const uint8_t *from = codes + k * m;
        uint8_t *to = out + k * bits / 8 * m;
        for (size_t i = 0; i < here; i++) to[i] |= (uint8_t)(from[i] << shift);
        for (size_t i = 0; i < here && shift + bits > 8; i++) to[m + i] |= (uint8_t)(from[i] >> (8 - shift));
    }
}

/* What packed was given. */
INSIDE void unpacked(const uint8_t *restrict bytes, size_t n, size_t bits, uint8_t *restrict codes)
{
    const size_t runs = bits % 2 ? 8 : bits % 4 ? 4 : 8 / bits, m = (n + runs - 1) / runs;
    const uint8_t mask = (uint8_t)((1u << bits) - 1);
    for (size_t k = 0; k < runs && k * m < n; k++) {
        const size_t here = n - k * m < m ? n - k * m : m, shift = k * bits % 8;
        const uint8_t *from = bytes + k * bits / 8 * m;
        uint8_t *to = codes + k * m;
        if (shift + bits > 8)
            for (size_t i = 0; i < here; i++) to[i] = (uint8_t)(from[i] >> shift | from[m + i] << (8 - shift)) & mask;
        else
            for (size_t i = 0; i < here; i++) to[i] = from[i] >> shift & mask;
    }
}

/* The values, or their difference to what is held. */
INSIDE void differences(const float *restrict x, const float *restrict held, size_t n, float *restrict y)
{
    if (held)
        for (size_t i = 0; i < n; i++) y[i] = x[i] - held[i];
    else
        memcpy(y, x, n * sizeof *y);
}

/* The largest magnitude, as bits: those of numbers that are not finite are the largest. */
INSIDE int32_t largest(const float *x, size_t n)
{
    int32_t peak = 0;
    for (size_t j = 0; j < n; j++) {
        const int32_t size = as_bits(x[j]) & INT32_MAX;
        peak = size > peak ? size : peak;
    }
    return peak;
}

/* The hash of noise.py's fingerprint. */
INSIDE uint64_t fingerprint(const float *x, size_t n, uint64_t seed)
{
    uint64_t sum = (seed + 1) * UINT64_C(0x9E3779B97F4A7C15);
    size_t i = 0;
    for (; i + 2 <= n; i += 2) {
        uint64_t both;
        memcpy(&both, x + i, 8);
        sum += both;
    }
    if (i < n) sum += (uint64_t)(int64_t)as_bits(x[i]);
    return mixed(sum);
}

/* The noise of a key for values from number i on, and for how many of n: noise.py's add_dither. */
INSIDE const float *noise_at(const float *table, uint64_t key, size_t i, size_t n, size_t *here)
{
    const size_t at = i % TABLE;
    *here = n - i < TABLE - at ? n - i : TABLE - at;
    return table + mixed(key + i / TABLE * UINT64_C(0x9E3779B97F4A7C15)) % TABLE + at;
}

INSIDE void add_noise(float *x, size_t n, const float *table, uint64_t key, float step)
{
    size_t here;
    for (size_t i = 0; i < n; i += here) {
        const float *noise = noise_at(table, key, i, n, &here);
        for (size_t j = 0; j < here; j++) x[i + j] += noise[j] * step;
    }
}

INSIDE float stored_scale(float step, float least, float most, uint16_t *scale)
{
    step = step < least ? least : step > most ? most : step;
    *scale = (uint16_t)((as_bits(step) + 0xFFFF) >> 16);
    return as_float((int32_t)*scale << 16);
}

INSIDE uint8_t level(float y, float top, float round)
{
    y = y > top ? top : y;
    y = y < -top ? -top : y;
    return (uint8_t)as_bits(y + round);
}

/* Uniform's codes of x, or of its difference to held, their scales, and what both stand for, on top of held: a scale a
   row, or one a column, of which there are width; with a table of noise, codes are of values and noise. Return how many
   scales there are, or -1 where a value is not finite. room: 2 width floats. */
FAST int64_t tw_uniform(const float *x, const float *held, size_t rows, size_t width, size_t by_column, size_t bits,
                        float share, float least, float most, const float *table, uint64_t seed, uint8_t *restrict codes,
                        uint16_t *restrict scales, uint8_t *restrict bytes, float *restrict values, float *restrict room)
{
    const size_t n = rows * width;
    const int32_t whole = (1 << (bits - 1)) - 1;
    const float top = (float)whole, round = 0x1.8p23f + top;
    float *step = room, *inverse = room + width;
    differences(x, held, n, values);
    const uint64_t key = table ? fingerprint(values, n, seed) : 0;
    if (by_column) {
        int32_t *peaks = (int32_t *)inverse;
        memset(peaks, 0, width * sizeof *peaks);
        for (size_t r = 0; r < rows; r++)
            for (size_t j = 0; j < width; j++) {
                const int32_t size = as_bits(values[r * width + j]) & INT32_MAX;
                peaks[j] = size > peaks[j] ? size : peaks[j];
            }
        for (size_t j = 0; j < width; j++) {
            if (peaks[j] >= 0x7F800000) return -1;
            step[j] = stored_scale(as_float(peaks[j]) * share, least, most, scales + j);
            inverse[j] = 1.0f / step[j];
        }
    }
    for (size_t r = 0; r < rows; r++) {
        float *own = values + r * width, one = 0;
        uint8_t *code = codes + r * width;
        if (!by_column) {
            const int32_t peak = largest(own, width);
            if (peak >= 0x7F800000) return -1;
            one = stored_scale(as_float(peak) * share, least, most, scales + r);
            const float by = 1.0f / one;
            for (size_t j = 0; j < width; j++) own[j] *= by;
        } else
            for (size_t j = 0; j < width; j++) own[j] *= inverse[j];
        size_t here = width;
        for (size_t i = 0; table && i < width; i += here) {
            const float *noise = noise_at(table, key, r * width + i, r * width + width, &here);
            for (size_t j = 0; j < here; j++) own[i + j] += noise[j];
        }
        for (size_t j = 0; j < width; j++) code[j] = level(own[j], top, round);
        if (by_column)
            for (size_t j = 0; j < width; j++) own[j] = (float)(int8_t)(uint8_t)(code[j] - whole) * step[j];
        else
            for (size_t j = 0; j < width; j++) own[j] = (float)(int8_t)(uint8_t)(code[j] - whole) * one;
        for (size_t j = 0; held && j < width; j++) own[j] += held[r * width + j];
    }
    if (bits < 8) packed(codes, n, bits, bytes);
    return (int64_t)(by_column ? width : rows);
}

/* What tw_uniform's bytes stand for; returns as it does, -1 where a scale is not within least and most. */
FAST int64_t tw_ununiform(const uint8_t *bytes, const uint16_t *scales, const float *held, size_t rows, size_t width,
                          size_t by_column, size_t bits, float least, float most, uint8_t *codes, float *restrict values,
                          float *restrict step)
{
    const int32_t whole = (1 << (bits - 1)) - 1;
    const size_t count = by_column ? width : rows;
    if (bits < 8) unpacked(bytes, rows * width, bits, codes);
    else codes = (uint8_t *)bytes;
    for (size_t k = 0; k < count; k++) {
        const float one = as_float((int32_t)((uint32_t)scales[k] << 16));
        if (!(one >= least && one <= most)) return -1;
        if (by_column) step[k] = one;
    }
    for (size_t r = 0; r < rows; r++) {
        const uint8_t *code = codes + r * width;
        float *own = values + r * width;
        const float one = by_column ? 0 : as_float((int32_t)((uint32_t)scales[r] << 16));
        if (by_column)
            for (size_t j = 0; j < width; j++) own[j] = (float)(int8_t)(uint8_t)(code[j] - whole) * step[j];
        else
            for (size_t j = 0; j < width; j++) own[j] = (float)(int8_t)(uint8_t)(code[j] - whole) * one;
        for (size_t j = 0; held && j < width; j++) own[j] += held[r * width + j];
    }
    return (int64_t)count;
}

/* DeadZone's codes of x, or of its difference to held, by a step that reaches the largest: packed; what they leave out,
   as zigzag numbers; the step; with a table of noise, its key; and what all stand for, on top of held. Return how many
   are left out, or -1 where a value is not finite or a value may not be. most_level: the largest level. */
FAST int64_t tw_zoned(const float *x, const float *held, size_t n, float step, float offset, int32_t most_level,
                      float least, float most, const float *table, uint8_t *codes, uint16_t *numbers, uint8_t *bytes,
                      uint16_t *scale, uint64_t *key, float *values)
{
    differences(x, held, n, values);
    const int32_t peak = largest(values, n);
    if (peak >= 0x7F800000) return -1;
    const float far = as_float(peak) / (float)most_level;
    step = stored_scale(step > far ? step : far, least, most, scale);
    if (step > 0x1p112f) return -1;
    const uint64_t own = table ? fingerprint(values, n, 0) : 0;
    if (table) add_noise(values, n, table, own, step);
    *key = own ^ SIGN;
    const int64_t count = tw_levels(values, n, 1.0f / step, offset, step, values, codes, numbers);
    if (table) add_noise(values, n, table, own, -step);
    for (size_t i = 0; held && i < n; i++) values[i] += held[i];
    tw_pack(codes, n, bytes);
    return count;
}

/* What tw_zoned's bytes stand for; returns as tw_values does, and -1 where the step is not within least and most. */
FAST int64_t tw_unzoned(const uint8_t *bytes, const float *held, size_t n, const uint8_t *others, size_t count,
                        const uint16_t *scale, float least, float most, const float *table, const uint64_t *key,
                        float *values)
{
    const float step = as_float((int32_t)((uint32_t)*scale << 16));
    if (!(step >= least && step <= most) || step > 0x1p112f) return -1;
    const int64_t found = tw_values(bytes, n, others, count, step, values);
    if (table) add_noise(values, n, table, *key ^ SIGN, -step);
    for (size_t i = 0; held && i < n; i++) values[i] += held[i];
    return found;
}

/* The sum of each row's words, modulo 2^32. */
FAST int64_t tw_sums(const uint32_t *x, size_t rows, size_t width, uint32_t *sums)
{
    for (size_t r = 0; r < rows; r++, x += width) {
        uint32_t sum = 0;
        for (size_t j = 0; j < width; j++) sum += x[j];
        sums[r] = sum;
    }
    return 0;
}
