/* Zstandard frames (RFC 8878) of literals alone: blocks of bytes that Huffman codes, and no matches.

   Everything is written as the RFC tells decoders to read it; "bits" below are added from the lowest of a byte
   on, and a stream of symbols begins with its last one, since decoders read such streams from their end.

   Nothing here checks its arguments: literals.py does. */

#include "passes.h"

#if __BYTE_ORDER__ != __ORDER_LITTLE_ENDIAN__ || __SIZEOF_POINTER__ != 8
#error "made for machines of 64 bits that store the lowest byte first"
#endif

enum { SYMBOLS = 256, DEEPEST = 11, WEIGHTS = DEEPEST + 1 }; /* bits of the longest Huffman code */
enum { STATE_BITS = 6, STATES = 1 << STATE_BITS };           /* of the coder of weights */
enum { BLOCK = 1 << 17, UNITS = 4, TABLE = 80 }; /* bytes of a block; parts of the data that may become blocks of
                                                    their own; bytes that a block costs besides its codes, about */

typedef struct {
    uint8_t *at, *end;
    uint64_t bits;
    unsigned count;
    int full; /* no room was left: what was written means nothing */
} Writer;

static inline void add(Writer *to, uint64_t value, unsigned bits)
{
    to->bits |= value << to->count;
    to->count += bits;
}

/* Write the whole bytes of what was added: at most 7 bits stay. At most 56 may be added between two flushes. */
static inline void flush(Writer *to)
{
    if (to->end - to->at < 8) to->full = 1, to->bits = to->count = 0;
    else memcpy(to->at, &to->bits, 8);
    to->at += to->count >> 3;
    to->bits >>= to->count & ~7u;
    to->count &= 7;
}

/* End with a whole byte; in a stream that is read backwards, a 1 before tells where it begins. */
static inline void pad(Writer *to)
{
    flush(to);
    to->at += to->count > 0;
    to->bits = to->count = 0;
}

static inline void put(uint8_t *to, uint64_t value, size_t bytes) { memcpy(to, &value, bytes); }

static inline unsigned top_bit(uint32_t x) { return 31u - (unsigned)__builtin_clz(x); }

/* log2 of x in 65536ths, to within 0.0002: the straight line between two powers of two, and its bulge. */
static inline uint64_t log2_of(uint32_t x)
{
    const unsigned top = top_bit(x);
    const uint64_t f = ((uint64_t)x << 16 >> top) & 65535;
    const uint64_t bulge = 28710 - (f * (15512 - (f * 5263 >> 16)) >> 16);
    return ((uint64_t)top << 16) + f + ((f * (65536 - f) >> 16) * bulge >> 16);
}

/* The bits that symbols of these counts take by their entropy, about. */
static uint64_t entropy(const uint32_t *counts)
{
    uint64_t total = 0, sum = 0;
    for (size_t s = 0; s < SYMBOLS; s++)
        if (counts[s]) {
            total += counts[s];
            sum += counts[s] * log2_of(counts[s]);
        }
    return total ? (total * log2_of((uint32_t)total) - sum) >> 16 : 0;
}

/* How often each byte is among n. */
static void count(const uint8_t *data, size_t n, uint32_t *counts)
{
    uint32_t own[4][SYMBOLS] = {{0}}; /* several: a count of the same byte would wait for the one before */
    size_t i = 0;
    for (; i + 4 <= n; i += 4)
        for (size_t k = 0; k < 4; k++) own[k][data[i + k]]++;
    for (; i < n; i++) own[0][data[i]]++;
    for (size_t s = 0; s < SYMBOLS; s++) counts[s] = own[0][s] + own[1][s] + own[2][s] + own[3][s];
}

typedef struct {
    uint32_t count;
    uint16_t parent, symbol;
} Node;

/* The symbols that there are, the rarest first; returns how many. */
static size_t leaves(const uint32_t *counts, Node *node)
{
    static const size_t gaps[] = {57, 23, 10, 4, 1}; /* Shell's sort, with Ciura's gaps */
    size_t n = 0;
    for (size_t s = 0; s < SYMBOLS; s++)
        if (counts[s]) node[n++] = (Node){counts[s], 0, (uint16_t)s};
    for (size_t g = 0; g < sizeof gaps / sizeof *gaps; g++)
        for (size_t i = gaps[g]; i < n; i++) {
            const Node own = node[i];
            size_t j = i;
            for (; j >= gaps[g] && node[j - gaps[g]].count > own.count; j -= gaps[g]) node[j] = node[j - gaps[g]];
            node[j] = own;
        }
    return n;
}

/* How deep each of n leaves is in Huffman's tree. */
static void depths(Node *node, size_t n, uint8_t *depth)
{
    size_t leaf = 0, inner = n, made = n;
    for (; made < 2 * n - 1; made++) {
        node[made].count = 0;
        for (int k = 0; k < 2; k++) {
            const int is_leaf = leaf < n && (inner == made || node[leaf].count <= node[inner].count);
            Node *child = &node[is_leaf ? leaf++ : inner++];
            child->parent = (uint16_t)made;
            node[made].count += child->count;
        }
    }
    depth[made - 1] = 0;
    for (size_t i = made - 1; i-- > 0;) depth[i] = (uint8_t)(depth[node[i].parent] + 1);
}

/* Make depths, of which there are codes for as many leaves, at most DEEPEST, and leave no code unused. */
static void limit(uint8_t *depth, size_t n)
{
    const uint32_t all = 1u << DEEPEST;
    uint32_t used = 0; /* a code of d bits uses up as many of the deepest as begin with it */
    for (size_t i = 0; i < n; i++) {
        if (depth[i] > DEEPEST) depth[i] = DEEPEST;
        used += all >> depth[i];
    }
    for (size_t i = 0; used > all;) { /* the rarest that can go deeper */
        if (depth[i] == DEEPEST) i++;
        else used -= all >> ++depth[i];
    }
    for (size_t i = n; i-- > 0;) /* the most frequent that can rise */
        while (used + (all >> depth[i]) <= all) used += all >> depth[i]--;
}

/* Lengths of the codes of two symbols or more, 0 for what there is none of; returns the longest. */
static unsigned lengths(const uint32_t *counts, uint8_t *length)
{
    Node node[2 * SYMBOLS];
    uint8_t depth[2 * SYMBOLS];
    const size_t n = leaves(counts, node);
    depths(node, n, depth);
    limit(depth, n);
    unsigned longest = 0;
    memset(length, 0, SYMBOLS);
    for (size_t i = 0; i < n; i++) {
        length[node[i].symbol] = depth[i];
        longest = depth[i] > longest ? depth[i] : longest;
    }
    return longest;
}

/* Of STATES states, the share of each of n weights, at least one of those that there are. Returns the largest weight,
   or -1 where all are alike: then no bits would be written, and nothing would tell their number. */
static int shares(const uint8_t *weights, size_t n, uint32_t *share)
{
    uint32_t counts[WEIGHTS] = {0}, others = 0;
    size_t most = 0;
    int last = 0;
    for (size_t i = 0; i < n; i++) counts[weights[i]]++;
    for (size_t w = 0; w < WEIGHTS; w++) {
        share[w] = (uint32_t)(counts[w] * STATES / n);
        if (counts[w] && !share[w]) share[w] = 1;
        if (counts[w] > counts[most]) most = w;
        if (counts[w]) last = (int)w;
        others += share[w];
    }
    share[most] += STATES - others; /* the most frequent has more than the few that were rounded up */
    return counts[most] == n ? -1 : last;
}

/* Describe the shares of the weights up to last (RFC 8878, 4.1.1). */
static void describe(const uint32_t *share, int last, Writer *to)
{
    int left = STATES + 1, reach = STATES, bits = STATE_BITS + 1;
    add(to, STATE_BITS - 5, 4);
    for (int w = 0; w <= last; w++) {
        int value = (int)share[w] + 1;
        const int most = 2 * reach - 1 - left;
        left -= (int)share[w];
        if (value >= reach) value += most;
        add(to, (uint64_t)value, (unsigned)(bits - (value < most)));
        if (!share[w]) { /* how many more there are none of, three at a time */
            int more = 0;
            while (!share[w + 1 + more]) more++;
            w += more;
            for (; more >= 3; more -= 3) add(to, 3, 2);
            add(to, (uint64_t)more, 2);
        }
        for (; left < reach; reach >>= 1) bits--;
        flush(to);
    }
    pad(to);
}

/* Write n weights, two or more, by finite states (RFC 8878, 4.2.1.2); returns whether that is possible. */
static int write_weights(const uint8_t *weights, size_t n, Writer *to)
{
    uint32_t share[WEIGHTS];
    const int last = shares(weights, n, share);
    if (last < 0) return 0;
    describe(share, last, to);

    uint8_t weight_of[STATES], from[WEIGHTS][STATES], first[WEIGHTS], bits[STATES], base[STATES];
    size_t at = 0;
    for (int w = 0; w <= last; w++)
        for (uint32_t k = 0; k < share[w]; k++) {
            weight_of[at] = (uint8_t)w;
            at = (at + STATES / 2 + STATES / 8 + 3) % STATES;
        }
    uint32_t next[WEIGHTS];
    memcpy(next, share, sizeof next);
    for (size_t u = 0; u < STATES; u++) { /* from u, reading so many bits leads to base + what they say */
        const uint8_t w = weight_of[u];
        if (next[w] == share[w]) first[w] = (uint8_t)u;
        bits[u] = (uint8_t)(STATE_BITS - top_bit(next[w]));
        base[u] = (uint8_t)((next[w]++ << bits[u]) - STATES);
        memset(from[w] + base[u], (int)u, (size_t)1 << bits[u]);
    }
    int state[2] = {-1, -1}; /* of the even and of the odd weights */
    for (size_t i = n; i-- > 0;) {
        int *own = &state[i & 1];
        const uint8_t w = weights[i], u = *own < 0 ? first[w] : from[w][*own];
        if (*own >= 0) add(to, (uint64_t)(*own - base[u]), bits[u]);
        flush(to);
        *own = u;
    }
    add(to, (uint64_t)state[1], STATE_BITS);
    add(to, (uint64_t)state[0] | 1 << STATE_BITS, STATE_BITS + 1);
    pad(to);
    return 1;
}

/* Write the tree by the weights of all symbols before the last one, whose weight follows; returns whether it fits. */
static int write_tree(const uint8_t *length, unsigned longest, size_t last, Writer *to)
{
    uint8_t weights[SYMBOLS + 1] = {0}, *head = to->at;
    for (size_t s = 0; s < last; s++) weights[s] = (uint8_t)(length[s] ? longest + 1 - length[s] : 0);
    const Writer begun = {head + 1, to->end, 0, 0, 0};
    *to = begun;
    if (last > 1 && write_weights(weights, last, to) && to->at - begun.at < 128) {
        *head = (uint8_t)(to->at - begun.at);
        return 1;
    }
    if (last > 128) return 0;
    *to = begun; /* four bits each */
    for (size_t s = 0; s < last; s += 2) {
        add(to, (uint64_t)(weights[s] << 4 | weights[s + 1]), 8);
        flush(to);
    }
    *head = (uint8_t)(127 + last);
    return 1;
}

typedef struct {
    uint16_t bits;
    uint8_t length;
} Code;

/* The codes: the longest begin with 0, and of one length they rise with the symbols. */
static void number(const uint8_t *length, unsigned longest, Code *code)
{
    uint32_t next = 0;
    for (unsigned l = longest; l; l--, next >>= 1)
        for (size_t s = 0; s < SYMBOLS; s++)
            if (length[s] == l) code[s] = (Code){(uint16_t)next++, (uint8_t)l};
}

static void write_stream(const uint8_t *data, size_t n, const Code *code, Writer *into)
{
    Writer to = *into; /* what is written to memory may be anything but this */
    for (; n & 3; n--) add(&to, code[data[n - 1]].bits, code[data[n - 1]].length);
    flush(&to);
    for (; n; n -= 4) {
        for (size_t k = 1; k <= 4; k++) {
            const Code own = code[data[n - k]];
            add(&to, own.bits, own.length);
        }
        flush(&to);
    }
    add(&to, 1, 1);
    pad(&to);
    *into = to;
}

/* Four streams, behind the lengths of the first three; or one. */
static void write_streams(const uint8_t *data, size_t n, size_t streams, const Code *code, Writer *to)
{
    uint8_t *sizes = to->at;
    const size_t part = (n + streams - 1) / streams;
    if (streams > 1) to->at += 6;
    for (size_t k = 0; k < streams && !to->full; k++) {
        const uint8_t *begun = to->at;
        write_stream(data + k * part, k + 1 < streams ? part : n - k * part, code, to);
        if (k + 1 < streams && !to->full) put(sizes + 2 * k, (uint64_t)(to->at - begun), 2);
    }
}

/* Write a block whose n bytes Huffman codes; null where it would take no less room than they do. */
static uint8_t *compressed(const uint8_t *data, size_t n, const uint32_t *counts, size_t top, int last, uint8_t *at,
                           uint8_t *end)
{
    const size_t head = n < 1 << 10 ? 3 : n < 1 << 14 ? 4 : 5, streams = n < SYMBOLS ? 1 : 4;
    if (end - at > (ptrdiff_t)n + 3) end = at + n + 3;
    if (entropy(counts) / 8 + head + 16 >= n || end - at < 64) return 0;
    uint8_t length[SYMBOLS];
    Code code[SYMBOLS] = {{0, 0}}; /* for what another thread writes to the data meanwhile */
    Writer to = {at + 3 + head, end, 0, 0, 0};
    const unsigned longest = lengths(counts, length);
    if (!write_tree(length, longest, top, &to)) return 0;
    number(length, longest, code);
    write_streams(data, n, streams, code, &to);
    if (to.full || to.at == end) return 0;
    const size_t size = (size_t)(to.at - at) - 3 - head;
    const unsigned bits = head == 3 ? 10 : head == 4 ? 14 : 18;
    const uint64_t format = head == 3 ? streams > 1 : head == 4 ? 2 : 3;
    *to.at++ = 0; /* sequences */
    put(at, (uint64_t)last | 2 << 1 | (uint64_t)(to.at - at - 3) << 3, 3);
    put(at + 3, 2 | format << 2 | (uint64_t)n << 4 | (uint64_t)size << (4 + bits), head);
    return to.at;
}

/* Write n bytes, of these counts, as a block; returns its end, or null where there is no room. */
static uint8_t *block(const uint8_t *data, size_t n, const uint32_t *counts, int last, uint8_t *at, uint8_t *end)
{
    size_t kinds = 0, top = 0;
    for (size_t s = 0; s < SYMBOLS; s++)
        if (counts[s]) kinds++, top = s;
    if (end - at < 4) return 0;
    if (kinds == 1) {
        put(at, (uint64_t)last | 1 << 1 | n << 3, 3);
        at[3] = (uint8_t)top;
        return at + 4;
    }
    uint8_t *found = compressed(data, n, counts, top, last, at, end);
    if (found || end - at < (ptrdiff_t)n + 3) return found;
    put(at, (uint64_t)last | n << 3, 3);
    memcpy(at + 3, data, n);
    return at + 3 + n;
}

/* The header of a frame of n bytes, which says how many they are; returns its end. */
static uint8_t *header(size_t n, uint8_t *at)
{
    const unsigned flag = n < 256 ? 0 : n < 65536 + 256 ? 1 : 2;
    put(at, UINT32_C(0xFD2FB528), 4);
    at[4] = (uint8_t)(flag << 6 | 1 << 5);
    put(at + 5, flag == 1 ? n - 256 : n, (size_t)1 << flag);
    return at + 5 + (1 << flag);
}

/* Add other counts; returns the entropy of both together. */
static uint64_t merged(const uint32_t *counts, const uint32_t *others, uint32_t *both)
{
    for (size_t s = 0; s < SYMBOLS; s++) both[s] = counts[s] + others[s];
    return entropy(both);
}

/* A frame of n bytes, 64 or more and below 2^32: neighbouring units of them share a block unless two take fewer bits.
   Returns its length, or -1 where there is no room for it. */
int64_t tw_literals(const uint8_t *data, size_t n, uint8_t *out, size_t room)
{
    const size_t halves = (n + BLOCK / 2 - 1) / (BLOCK / 2), units = halves > UNITS ? halves : UNITS;
    uint32_t known[UNITS][SYMBOLS], here[SYMBOLS], both[SYMBOLS];
    uint64_t bits = 0;
    for (size_t unit = units; unit-- > 0;) { /* so that at the end the first are known */
        const size_t begin = unit * n / units;
        count(data + begin, (unit + 1) * n / units - begin, known[unit % UNITS]);
        bits += entropy(known[unit % UNITS]);
    }
    if (room < 64 || bits / 8 + 16 >= room) return -1;
    uint8_t *at = header(n, out);
    size_t start = 0;
    memcpy(here, known[0], sizeof here);
    bits = entropy(here);
    for (size_t unit = 1; unit < units; unit++) {
        const size_t begin = unit * n / units, end = (unit + 1) * n / units;
        uint32_t *ahead = known[unit % UNITS];
        if (unit >= UNITS) count(data + begin, end - begin, ahead);
        const uint64_t own = entropy(ahead), together = merged(here, ahead, both);
        const int joins = end - start <= BLOCK && together <= bits + own + 8 * TABLE;
        if (!joins) {
            at = block(data + start, begin - start, here, 0, at, out + room);
            if (!at) return -1;
            start = begin;
        }
        memcpy(here, joins ? both : ahead, sizeof here);
        bits = joins ? together : own;
    }
    at = block(data + start, n - start, here, 1, at, out + room);
    return at ? at - out : -1;
}
