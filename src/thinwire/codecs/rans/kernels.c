/* Range coding by asymmetric numeral systems (Duda 2013), many lanes beside each other; the layout is in grid.py.

   Lane l of a stream codes its symbols l, l + lanes, l + 2 lanes, ... A state is in [LOW, LOW << 16): a symbol of
   frequency f (of 2^bits) takes it to (x / f << bits) + start + x % f, and before that 16 bits of it become a word
   where it would grow too large. Who decodes goes the same way back, so whoever encodes begins with the last symbol
   and fills the stream from its end.

   encode checks nothing: rans_calls.py does. decode checks whatever the bytes say. */

#include "passes.h"
#if defined(__x86_64__)
#include <immintrin.h>
#endif

#if __BYTE_ORDER__ != __ORDER_LITTLE_ENDIAN__ || __SIZEOF_POINTER__ != 8
#error "made for machines of 64 bits that store the lowest byte first"
#endif

enum { SYMBOLS = 256, LANES = 32, STREAMS = 4, STREAM = 1 << 15 }; /* symbols of a stream, at most */
enum { LOW = 1 << 15, LEAST = 8, MOST = 12, SLOTS = 1 << MOST };  /* bits of the sum of the frequencies */
enum { CONSTANT = 255, PARAMETERS = 12, TABLE = 2 + SYMBOLS * (2 * MOST + 1) / 8 + 8 };

static inline size_t least(size_t a, size_t b) { return a < b ? a : b; }

static inline size_t parts(size_t n, size_t of) { return (n + of - 1) / of; }

static inline unsigned width(uint32_t x) { return x ? 32u - (unsigned)__builtin_clz(x) : 0; }

/* Bits of the sum of the frequencies of n symbols. */
static inline unsigned precision(size_t n)
{
    const unsigned bits = width((uint32_t)(n - 1));
    return bits < LEAST ? LEAST : bits > MOST ? MOST : bits;
}

/* How often each symbol is among n. */
static void count(const uint8_t *data, size_t n, uint32_t *counts)
{
    uint32_t own[4][SYMBOLS] = {{0}}; /* several: a count of the same byte would wait for the one before */
    size_t i = 0;
    for (; i + 4 <= n; i += 4)
        for (size_t k = 0; k < 4; k++) own[k][data[i + k]]++;
    for (; i < n; i++) own[0][data[i]]++;
    for (size_t s = 0; s < SYMBOLS; s++) counts[s] = own[0][s] + own[1][s] + own[2][s] + own[3][s];
}

/* The share of a symbol at a scale: rounded, but one at least of those that there are. */
static inline uint32_t share(uint32_t count, uint32_t scale, uint32_t n)
{
    const uint32_t rounded = (count * scale + n / 2) / n;
    return count ? rounded ? rounded : 1 : 0;
}

/* Frequencies that sum to 2^bits: at the largest scale where they do not sum to more; and one more for the first of
   those that would rise next. No symbol is above top. */
static void normalise(const uint32_t *counts, size_t top, uint32_t n, unsigned bits, uint32_t *freq)
{
    const uint32_t all = 1u << bits;
    uint32_t low = 0, high = all + SYMBOLS + 1, sum;
    while (high - low > 1) {
        const uint32_t scale = (low + high) / 2;
        sum = 0;
        for (size_t s = 0; s <= top; s++) sum += share(counts[s], scale, n);
        if (sum <= all) low = scale;
        else high = scale;
    }
    sum = 0;
    for (size_t s = 0; s <= top; s++) sum += freq[s] = share(counts[s], low, n);
    for (size_t s = 0; s <= top && sum < all; s++)
        if (share(counts[s], high, n) > freq[s]) freq[s]++, sum++;
}

/* Write frequencies by exponential Golomb codes, but for the last, which is what is left; returns the bytes. */
static size_t write_table(const uint32_t *freq, size_t top, uint8_t *out)
{
    size_t best = 0, bits = SIZE_MAX;
    for (size_t k = 0; k < PARAMETERS; k++) {
        size_t own = 0;
        for (size_t s = 0; s < top; s++) own += 2 * width((freq[s] >> k) + 1) - 1 + k;
        if (own < bits) best = k, bits = own;
    }
    memset(out, 0, TABLE);
    out[0] = (uint8_t)best, out[1] = (uint8_t)top;
    size_t at = 16;
    for (size_t s = 0; s < top; s++) {
        const uint64_t q = (freq[s] >> best) + 1;
        const unsigned w = width((uint32_t)q);
        const uint64_t low = q ^ UINT64_C(1) << (w - 1), rest = freq[s] & ((1u << best) - 1);
        uint64_t window;
        memcpy(&window, out + at / 8, 8);
        window |= (UINT64_C(1) << (w - 1) | low << w | rest << (2 * w - 1)) << (at & 7);
        memcpy(out + at / 8, &window, 8);
        at += 2 * w - 1 + best;
    }
    return (at + 7) / 8;
}

/* Read what write_table wrote, of exactly these bytes; returns whether it is one. */
static int read_table(const uint8_t *table, size_t bytes, unsigned bits, uint32_t *freq)
{
    const size_t k = table[0], top = table[1];
    uint32_t left = 1u << bits;
    size_t at = 16;
    memset(freq, 0, SYMBOLS * sizeof *freq);
    if (k >= PARAMETERS) return 0;
    for (size_t s = 0; s < top; s++) {
        uint64_t window = 0;
        if (at / 8 >= bytes) return 0;
        memcpy(&window, table + at / 8, least(8, bytes - at / 8));
        window >>= at & 7;
        const unsigned zeros = window ? (unsigned)__builtin_ctzll(window) : 64;
        if (zeros > MOST) return 0;
        const uint32_t q = (uint32_t)(window >> (zeros + 1) & ((1u << zeros) - 1)) | 1u << zeros;
        freq[s] = (q - 1) << k | (uint32_t)(window >> (2 * zeros + 1) & ((1u << k) - 1));
        if (freq[s] >= left) return 0;
        left -= freq[s];
        at += 2 * zeros + 1 + k;
    }
    freq[top] = left;
    return (at + 7) / 8 == bytes && left < 1u << bits;
}

typedef struct {
    uint32_t limit, reciprocal, bias, others; /* others: 2^bits - frequency */
    uint32_t shift;
} Step;

/* What coding a symbol takes: x / f is x * reciprocal >> shift, exactly for x < 2^31 (but one less for f = 1). */
static Step step_of(uint32_t freq, uint32_t start, unsigned bits)
{
    Step to = {freq << (31 - bits), 0, start, (1u << bits) - freq, 32};
    if (freq < 2) {
        to.reciprocal = UINT32_MAX;
        to.bias = start + (1u << bits) - 1;
        return to;
    }
    const unsigned w = width(freq - 1);
    to.reciprocal = (uint32_t)(((UINT64_C(1) << (w + 31)) + freq - 1) / freq);
    to.shift = w + 31;
    return to;
}

static inline __attribute__((always_inline)) uint16_t *coded(const uint8_t *data, size_t n, size_t lanes,
                                                             const Step *steps, uint32_t *state, uint16_t *at)
{
    for (size_t end = n; end;) {
        const size_t begin = (end - 1) / lanes * lanes;
        for (size_t l = end - begin; l-- > 0;) {
            const Step *to = &steps[data[begin + l]];
            uint32_t x = state[l];
            const int full = x >= to->limit;
            at[-1] = (uint16_t)x;
            at -= full;
            x = full ? x >> 16 : x;
            state[l] = x + to->bias + (uint32_t)((uint64_t)x * to->reciprocal >> to->shift) * to->others;
        }
        end = begin;
    }
    return at;
}

/* Code n symbols, at most STREAM of them, to end before a place; returns where they begin. */
static uint16_t *stream(const uint8_t *data, size_t n, size_t lane, const Step *steps, uint16_t *end)
{
    const size_t lanes = parts(n, lane);
    uint32_t state[LANES];
    for (size_t l = 0; l < lanes; l++) state[l] = LOW;
    end = lanes == LANES ? coded(data, n, LANES, steps, state, end) : coded(data, n, lanes, steps, state, end);
    end -= 2 * lanes;
    memcpy(end, state, lanes * sizeof *state);
    return end;
}

static inline void put(uint8_t *at, size_t value) { at[0] = (uint8_t)value, at[1] = (uint8_t)(value >> 8); }

static inline size_t get(const uint8_t *at) { return at[0] | (size_t)at[1] << 8; }

/* Code a segment of n symbols; returns its end, or null where there is no room. */
static uint8_t *segment(const uint8_t *data, size_t n, size_t lane, uint8_t *table, uint8_t *words, uint8_t *at,
                        const uint8_t *end)
{
    uint32_t counts[SYMBOLS], freq[SYMBOLS];
    uint8_t head[TABLE];
    count(data, n, counts);
    size_t kinds = 0, top = 0, bytes = 2;
    for (size_t s = 0; s < SYMBOLS; s++)
        if (counts[s]) kinds++, top = s;
    const unsigned bits = precision(n);
    if (kinds == 1) {
        head[0] = CONSTANT, head[1] = (uint8_t)top;
    } else {
        normalise(counts, top, (uint32_t)n, bits, freq);
        bytes = write_table(freq, top, head);
    }
    if ((size_t)(end - at) < bytes) return 0;
    memcpy(at, head, bytes);
    at += bytes;
    put(table, bytes);

    uint16_t room[1 + STREAM + 2 * LANES];
    Step steps[SYMBOLS] = {{0, 0, 0, 0, 0}}; /* also for what another thread writes to the data meanwhile */
    for (size_t s = 0, start = 0; s <= top && kinds > 1; start += freq[s++])
        if (freq[s]) steps[s] = step_of(freq[s], (uint32_t)start, bits);
    for (size_t begin = 0; begin < n; begin += LANES * lane, words += 2) {
        uint16_t *last = room + sizeof room / sizeof *room, *first = last;
        if (kinds > 1) first = stream(data + begin, least(LANES * lane, n - begin), lane, steps, last);
        put(words, (size_t)(last - first));
        if (end - at < 2 * (last - first)) return 0;
        memcpy(at, first, (size_t)(last - first) * 2);
        at += 2 * (last - first);
    }
    return at;
}

/* Code planes of n symbols each; a lane has as many of them. Returns the length, or -1 where there is no room. */
int64_t tw_encode(const uint8_t *data, size_t n, size_t planes, size_t lane, uint8_t *out, size_t room)
{
    const size_t unit = STREAMS * LANES * lane, whole = parts(n, unit), each = parts(n, LANES * lane);
    uint8_t *table = out, *words = out + 2 * planes * whole, *at = words + 2 * planes * each;
    if (room < 2 * planes * (whole + each)) return -1;
    for (size_t p = 0; p < planes; p++, data += n)
        for (size_t begin = 0; begin < n; begin += unit, table += 2) {
            const size_t own = least(unit, n - begin);
            at = segment(data + begin, own, lane, table, words, at, out + room);
            if (!at) return -1;
            words += 2 * parts(own, LANES * lane);
        }
    return at - out;
}

/* What a slot of the table stands for: a symbol, its frequency, and the slot's place among those of the symbol. */
static void spread(const uint32_t *freq, uint32_t *slot)
{
    for (uint32_t s = 0; s < SYMBOLS; s++)
        for (uint32_t i = 0; i < freq[s]; i++) *slot++ = s << 24 | freq[s] << 12 | i;
}

/* Decode a step of n lanes; with no word left for each, look before each read. Returns null where one is missing. */
static inline __attribute__((always_inline)) const uint8_t *step(const uint32_t *slot, size_t n, unsigned bits,
                                                                 uint32_t *state, const uint8_t *at,
                                                                 const uint8_t *end, uint8_t *out)
{
    const uint32_t mask = (1u << bits) - 1;
    for (size_t l = 0; l < n; l++) {
        const uint32_t entry = slot[state[l] & mask];
        const uint32_t x = (entry >> 12 & 4095) * (state[l] >> bits) + (entry & 4095), empty = x < LOW;
        uint16_t word = 0;
        if (end && empty && at == end) return 0;
        if (!end || empty) memcpy(&word, at, 2);
        out[l] = (uint8_t)(entry >> 24);
        state[l] = x << 16 * empty | (word & -empty); /* no branch: it would be mispredicted */
        at += 2 * empty;
    }
    return at;
}

static inline __attribute__((always_inline)) const uint8_t *decoded(const uint32_t *slot, size_t n, size_t lanes,
                                                                    unsigned bits, uint32_t *state, const uint8_t *at,
                                                                    const uint8_t *end, uint8_t *out)
{
    size_t i = 0;
    for (; i + lanes <= n && (size_t)(end - at) >= 2 * lanes; i += lanes)
        at = step(slot, lanes, bits, state, at, 0, out + i);
    for (; i < n && at; i += lanes) at = step(slot, least(lanes, n - i), bits, state, at, end, out + i);
    return at;
}

#if defined(__x86_64__)
static uint8_t rank[256][8]; /* for each mask of 8 lanes, which of the next words each of those takes */

__attribute__((constructor)) static void ranks(void)
{
    for (unsigned mask = 0; mask < 256; mask++)
        for (unsigned l = 0; l < 8; l++) rank[mask][l] = (uint8_t)__builtin_popcount(mask & ((1u << l) - 1));
}

/* As decoded, for groups of 8 lanes, as long as no word needs to be looked for; returns how many symbols. What lanes
   that are not there decode is written as well, and then over. */
__attribute__((target("avx2"), always_inline)) static inline size_t
grouped(const uint32_t *slot, size_t n, size_t lanes, int groups, unsigned bits, uint32_t *state, const uint8_t **from,
        const uint8_t *end, uint8_t *out)
{
    const uint32_t there = UINT32_MAX >> (LANES - lanes);
    const __m256i mask = _mm256_set1_epi32((1 << bits) - 1), low = _mm256_set1_epi32(LOW);
    const __m256i field = _mm256_set1_epi32(4095), order = _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7);
    const __m128i shift = _mm_cvtsi32_si128((int)bits);
    const uint8_t *at = *from;
    __m256i x[4], entry[4] = {low, low, low, low};
    size_t i = 0;
    for (int g = 0; g < groups; g++) x[g] = _mm256_loadu_si256((const __m256i *)(state + 8 * g));
    for (; i + LANES <= n && end - at >= 2 * LANES + 16; i += lanes) {
        for (int g = 0; g < groups; g++) {
            entry[g] = _mm256_i32gather_epi32((const int *)slot, _mm256_and_si256(x[g], mask), 4);
            const __m256i freq = _mm256_and_si256(_mm256_srli_epi32(entry[g], 12), field);
            x[g] = _mm256_mullo_epi32(freq, _mm256_srl_epi32(x[g], shift));
            x[g] = _mm256_add_epi32(x[g], _mm256_and_si256(entry[g], field));
        }
        for (int g = 0; g < groups; g++) {
            const __m256i empty = _mm256_cmpgt_epi32(low, x[g]);
            const unsigned all = (unsigned)_mm256_movemask_ps(_mm256_castsi256_ps(empty));
            const unsigned which = all & there >> 8 * g & 255;
            const __m256i next = _mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i *)at));
            const __m256i own = _mm256_cvtepu8_epi32(_mm_loadl_epi64((const __m128i *)rank[which]));
            const __m256i word = _mm256_permutevar8x32_epi32(next, own);
            const __m256i longer = _mm256_or_si256(_mm256_slli_epi32(x[g], 16), word);
            x[g] = _mm256_blendv_epi8(x[g], longer, empty);
            at += 2 * __builtin_popcount(which);
        }
        for (int g = 0; g < groups; g++) entry[g] = _mm256_srli_epi32(entry[g], 24);
        const __m256i halves = _mm256_packus_epi16(_mm256_packus_epi32(entry[0], entry[1]),
                                                   _mm256_packus_epi32(entry[2], entry[3]));
        _mm256_storeu_si256((__m256i *)(out + i), _mm256_permutevar8x32_epi32(halves, order));
    }
    for (int g = 0; g < groups; g++) _mm256_storeu_si256((__m256i *)(state + 8 * g), x[g]);
    *from = at;
    return i;
}

__attribute__((target("avx2"))) static size_t together(const uint32_t *slot, size_t n, size_t lanes, unsigned bits,
                                                       uint32_t *state, const uint8_t **from, const uint8_t *end,
                                                       uint8_t *out)
{
    if (lanes <= 8) return grouped(slot, n, lanes, 1, bits, state, from, end, out);
    if (lanes <= 16) return grouped(slot, n, lanes, 2, bits, state, from, end, out);
    return lanes < LANES ? grouped(slot, n, lanes, 4, bits, state, from, end, out)
                         : grouped(slot, n, LANES, 4, bits, state, from, end, out);
}
#endif

/* Decode a stream; returns its end, or null where a word is missing. */
static const uint8_t *broad(const uint32_t *slot, size_t n, size_t lanes, unsigned bits, uint32_t *state,
                            const uint8_t *at, const uint8_t *end, uint8_t *out)
{
    size_t done = 0;
#if defined(__x86_64__)
    if (lanes > 3 && __builtin_cpu_supports("avx2")) done = together(slot, n, lanes, bits, state, &at, end, out);
#endif
    return decoded(slot, n - done, lanes, bits, state, at, end, out + done);
}

/* Decode a stream of n symbols that lies between at and end; returns whether it is one. */
static int unstream(const uint32_t *slot, size_t n, size_t lane, unsigned bits, const uint8_t *at, const uint8_t *end,
                    uint8_t *out)
{
    const size_t lanes = parts(n, lane);
    uint32_t state[LANES];
    if ((size_t)(end - at) < 4 * lanes) return 0;
    memcpy(state, at, 4 * lanes);
    for (size_t l = 0; l < lanes; l++)
        if (state[l] < LOW || state[l] >> 31) return 0;
    at += 4 * lanes;
    for (size_t l = lanes; l < LANES; l++) state[l] = LOW;
    at = broad(slot, n, lanes, bits, state, at, end, out);
    for (size_t l = 0; l < lanes; l++)
        if (state[l] != LOW) return 0;
    return at == end;
}

/* Decode a segment of n symbols; returns its end, or null where it is none. */
static const uint8_t *unsegment(size_t n, size_t lane, size_t bytes, const uint8_t *words, const uint8_t *at,
                                const uint8_t *end, uint8_t *out)
{
    uint32_t freq[SYMBOLS], slot[SLOTS];
    const unsigned bits = precision(n);
    if (bytes < 2 || (size_t)(end - at) < bytes) return 0;
    const int constant = at[0] == CONSTANT;
    if (constant) {
        if (bytes != 2) return 0;
        memset(out, at[1], n);
    } else {
        if (!read_table(at, bytes, bits, freq)) return 0;
        spread(freq, slot);
    }
    at += bytes;
    for (size_t begin = 0; begin < n; begin += LANES * lane, words += 2) {
        const size_t own = least(LANES * lane, n - begin), length = 2 * get(words);
        if ((size_t)(end - at) < length || (constant && length)) return 0;
        if (!constant && !unstream(slot, own, lane, bits, at, at + length, out + begin)) return 0;
        at += length;
    }
    return at;
}

/* Decode planes of n symbols each; returns 0, or -1 where the bytes are not what encode makes. */
int64_t tw_decode(const uint8_t *body, size_t length, size_t n, size_t planes, size_t lane, uint8_t *out)
{
    const size_t unit = STREAMS * LANES * lane, whole = parts(n, unit), each = parts(n, LANES * lane);
    const uint8_t *table = body, *words = body + 2 * planes * whole, *at = words + 2 * planes * each;
    const uint8_t *end = body + length;
    if (length < 2 * planes * (whole + each)) return -1;
    for (size_t p = 0; p < planes; p++, out += n)
        for (size_t begin = 0; begin < n; begin += unit, table += 2) {
            const size_t own = least(unit, n - begin);
            at = unsegment(own, lane, get(table), words, at, end, out + begin);
            if (!at) return -1;
            words += 2 * parts(own, LANES * lane);
        }
    return at == end ? 0 : -1;
}

enum { AS_IT_IS = 0, PACKED = 1 }; /* how symbols lie in a part; from 2 on, as the bytes of values of so many */

/* The symbols of a part of n, at most STREAM of them, where they do not lie as they are coded. */
static void apart(const uint8_t *data, size_t n, size_t how, size_t bits, uint8_t *symbols)
{
    const size_t each = how == PACKED ? 8 / bits : how, m = n / each;
    const uint8_t mask = (uint8_t)((1u << bits) - 1);
    for (size_t k = 0; k < each; k++)
        for (size_t i = 0; i < m; i++)
            symbols[k * m + i] = how == PACKED ? data[i] >> k * bits & mask : data[i * each + k];
}

/* What apart was given. */
static void joined(const uint8_t *symbols, size_t n, size_t how, size_t bits, uint8_t *data)
{
    const size_t each = how == PACKED ? 8 / bits : how, m = n / each;
    if (how == PACKED) memset(data, 0, m);
    for (size_t k = 0; k < each; k++)
        for (size_t i = 0; i < m; i++)
            if (how == PACKED) data[i] |= (uint8_t)(symbols[k * m + i] << k * bits);
            else data[i * each + k] = symbols[k * m + i];
}

/* Write a tag, the head of a frame and the body of the n symbols of a part. Return the length of all, or -1 where there
   is no room; so are more than STREAM symbols that do not lie as they are coded. */
int64_t tw_framed(const uint8_t *data, size_t n, size_t how, size_t planes, size_t bits, size_t tag, uint8_t *out,
                  size_t room)
{
    const size_t log = (planes > 1) + (planes > 2) + (planes > 4);
    uint8_t symbols[STREAM], head[12] = {(uint8_t)tag, (uint8_t)(log | bits << 4)};
    size_t at = 2, rest = n;
    for (; rest > 127; rest >>= 7) head[at++] = (uint8_t)(rest | 128);
    head[at++] = (uint8_t)rest;
    if (room < at || (how != AS_IT_IS && n > STREAM)) return -1;
    memcpy(out, head, at);
    if (how != AS_IT_IS) apart(data, n, how, bits, symbols);
    const size_t lane = STREAM / LANES * (8 / bits);
    const int64_t body = tw_encode(how == AS_IT_IS ? data : symbols, n / planes, planes, lane, out + at, room - at);
    return body < 0 ? -1 : body + (int64_t)at;
}

/* Decode a body of n symbols to a part, as tw_framed was given it; returns as tw_decode does. */
int64_t tw_unframed(const uint8_t *body, size_t length, size_t n, size_t how, size_t planes, size_t bits, uint8_t *out)
{
    uint8_t symbols[STREAM];
    if (how != AS_IT_IS && n > STREAM) return -1;
    const size_t lane = STREAM / LANES * (8 / bits);
    const int64_t done = tw_decode(body, length, n / planes, planes, lane, how == AS_IT_IS ? out : symbols);
    if (how != AS_IT_IS && !done) joined(symbols, n, how, bits, out);
    return done;
}

/* How many of n bytes, at most 64 thousand, repeat what was there before, by MATCH and more: that alone is what
   Zstandard finds in a small part and this coder does not. */
int64_t tw_repeated(const uint8_t *data, size_t n)
{
    enum { MATCH = 7, BITS = 10 };
    uint16_t places[1 << BITS] = {0}; /* behind where each of some was seen */
    size_t found = 0;
    for (size_t i = 0; i + 8 <= n;) {
        uint64_t here, there = 0;
        memcpy(&here, data + i, 8);
        here <<= 8;
        uint16_t *place = &places[here * UINT64_C(0x9E3779B97F4A7C15) >> (64 - BITS)];
        const size_t before = *place;
        if (before) memcpy(&there, data + before - 1, 8);
        *place = (uint16_t)(i + 1);
        if (!before || there << 8 != here) {
            i++;
            continue;
        }
        size_t k = MATCH;
        while (i + k < n && data[before - 1 + k] == data[i + k]) k++;
        found += k;
        i += k;
    }
    return (int64_t)found;
}
