// Products of tokens with 4-bit weights: a few rows are decoded at a time and stay in the first cache, so that memory gives half a byte for a weight.
// Products of gradients with them, a few columns at a time.
// LoRA adapters added to such products, read where vLLM keeps them. The norm between
// such products. Built by `cpu_kernel.py`, without headers of torch.
//
// A weight is bf16(value[code] * scale), as bitsandbytes decodes it; products are added up in float32 and rounded once to bf16. The
// bits of a token's result depend neither on the other tokens nor on the number of threads.
//
// Letters: T tokens, I and O columns and rows of a weight, R rank of an adapter, N parts of a fused linear.

#include <immintrin.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <type_traits>
#include <vector>

namespace {

constexpr int GROUP = 4;                   // rows of a weight that a tile has
constexpr int64_t HELD_BYTES = 24 << 10;  // of rows that are decoded at a time: they stay in the first cache while all tokens are multiplied
constexpr int64_t MOST_GROUPS = 8;         // of them: threads share the rows of a small weight
constexpr int64_t FEW = 64;                // tokens, with which memory counts: the next rows are asked for while these are multiplied
constexpr int64_t LINE = 64;               // bytes that come from memory together
constexpr int64_t OPENED = 30;            // with which rows are decoded while the first tokens are multiplied, where there are registers for both
constexpr int64_t CHUNK_BYTES = 1 << 20;    // of tokens, that are multiplied with all rows before the next ones
constexpr int64_t PANEL = 64;              // columns of a weight that are summed up along its rows
constexpr int64_t PANEL_ROWS = 2048;       // of them, decoded at a time
constexpr int64_t MOST_SUMS = 2048;        // tokens of a gradient, of which sums are kept at a time
constexpr size_t KEPT_BYTES = 16 << 20;    // of tokens, from call to call; of one thread
constexpr int64_t OUTPUTS = 64;            // of an adapter, that are added at a time
constexpr int64_t LANES = 16;              // sums of squares side by side
constexpr int64_t NORMED = 1 << 13;        // numbers that are worth a second thread

struct alignas(64) Line {
    char bytes[64];
};

// Weights of 4 bits, [O, I] each.
struct Coded {
    const uint8_t* const* codes;
    const float* const* scales;
    const float* table;
    int64_t columns, block;

    const uint8_t* row(int64_t weight, int64_t row) const { return codes[weight] + row * columns / 2; }
    const float* row_scales(int64_t weight, int64_t row) const { return scales[weight] + row * columns / block; }
    const char* at(int64_t weight, int64_t number) const { return (const char*)row(weight, number); }
};

inline float wide(uint16_t x) {
    const uint32_t bits = (uint32_t)x << 16;
    float found;
    std::memcpy(&found, &bits, sizeof found);
    return found;
}

// To the nearest bf16, ties to even.
inline uint16_t narrow(float x) {
    uint32_t bits;
    std::memcpy(&bits, &x, sizeof bits);
    return (uint16_t)((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}

// 8 rows of 8 numbers of 32 bits become columns, each at `to` and its multiples of `apart`.
inline void turned_8x8(const __m256i* row, uint32_t* to, int64_t apart) {
    __m256i two[8], four[8];
    for (int k = 0; k < 8; k += 2) {
        two[k] = _mm256_unpacklo_epi32(row[k], row[k + 1]);
        two[k + 1] = _mm256_unpackhi_epi32(row[k], row[k + 1]);
    }
    for (int k = 0; k < 8; k += 4)
        for (int l = 0; l < 2; l++) {
            four[k + 2 * l] = _mm256_unpacklo_epi64(two[k + l], two[k + 2 + l]);
            four[k + 2 * l + 1] = _mm256_unpackhi_epi64(two[k + l], two[k + 2 + l]);
        }
    for (int k = 0; k < 4; k++) {
        _mm256_storeu_si256((__m256i*)(to + k * apart), _mm256_permute2x128_si256(four[k], four[k + 4], 0x20));
        _mm256_storeu_si256((__m256i*)(to + (k + 4) * apart), _mm256_permute2x128_si256(four[k], four[k + 4], 0x31));
    }
}

#ifdef __AVX512BF16__

using Number = uint16_t;  // bf16
constexpr int TOKENS = 6, ADDED = 4, BACK = 6;  // at a time: of a weight, of an adapter, of a gradient
struct Values {
    __m512 all;
};

inline Values values_of(const float* table) { return {_mm512_loadu_ps(table)}; }

// The 16 weights that a block can have, rounded once; they stand there twice.
inline __m512i weights_of(Values values, float scale) {
    return _mm512_broadcast_i64x4((__m256i)_mm512_cvtneps_pbh(_mm512_mul_ps(values.all, _mm512_set1_ps(scale))));
}

// 32 weights of a block: a code of 4 bits picks one, whatever stands above it.
inline __m512i picked(const uint8_t* codes, __m512i weights) {
    const __m512i bytes = _mm512_cvtepu8_epi32(_mm_loadu_si128((const __m128i*)codes));
    return _mm512_permutexvar_epi16(_mm512_or_si512(_mm512_srli_epi32(bytes, 4), _mm512_slli_epi32(bytes, 16)), weights);
}

// One row [I].
inline void decode(const uint8_t* codes, const float* scales, Values values, int64_t columns, int64_t block, Number* out) {
    for (int64_t start = 0; start < columns; start += block) {
        const __m512i weights = weights_of(values, *scales++);
        for (int64_t i = start; i < start + block; i += 32) _mm512_storeu_si512(out + i, picked(codes + i / 2, weights));
    }
}

// Of the numbers of two registers pairs are added: those of both halves, neighbours, those of quarters 0 and 1, 2 and 3. Half as many are left of each.
inline __m512 halves(__m512 a, __m512 b) { return _mm512_add_ps(_mm512_shuffle_f32x4(a, b, 0x44), _mm512_shuffle_f32x4(a, b, 0xee)); }
inline __m512 neighbours(__m512 a, __m512 b) { return _mm512_add_ps(_mm512_shuffle_ps(a, b, 0x88), _mm512_shuffle_ps(a, b, 0xdd)); }
inline __m512 quarters(__m512 a, __m512 b) { return _mm512_add_ps(_mm512_shuffle_f32x4(a, b, 0x88), _mm512_shuffle_f32x4(a, b, 0xdd)); }

// The sums of GROUP rows for each of two tokens, still in two parts.
inline __m512 of_two(const __m512* first, const __m512* second) {
    __m512 row[GROUP];
    for (int o = 0; o < GROUP; o++) row[o] = halves(first[o], second[o]);
    return neighbours(neighbours(row[0], row[1]), neighbours(row[2], row[3]));
}

// The sums of a tile.
template <int T>
inline void round_sums(const __m512 (&sum)[T][GROUP], uint16_t* out, int64_t stride, int rows) {
    // Four tokens together: one by one a weight with 256 columns took a quarter longer.
    uint16_t found[(T + 3) / 4 * 4 * GROUP];
    for (int t = 0; t < T; t += 4) {
        const __m512 two = of_two(sum[t], sum[std::min(t + 1, T - 1)]);
        const __m512 more = t + 2 < T ? of_two(sum[std::min(t + 2, T - 1)], sum[std::min(t + 3, T - 1)]) : two;
        _mm256_storeu_si256((__m256i*)(found + t * GROUP), (__m256i)_mm512_cvtneps_pbh(quarters(two, more)));
    }
    for (int t = 0; t < T; t++) {
        if (rows == GROUP)
            std::memcpy(out + t * stride, found + t * GROUP, GROUP * sizeof *out);
        else
            for (int o = 0; o < rows; o++) out[t * stride + o] = found[t * GROUP + o];
    }
}

// T tokens and GROUP rows.
template <int T>
inline void tile(const Number* x, const Number* weights, int64_t columns, int64_t width, uint16_t* out, int64_t stride, int rows) {
    __m512 sum[T][GROUP];
    for (int t = 0; t < T; t++)
        for (int o = 0; o < GROUP; o++) sum[t][o] = _mm512_setzero_ps();
    for (int64_t i = 0; i < columns; i += 32) {
        __m512bh weight[GROUP];
        for (int o = 0; o < GROUP; o++) weight[o] = (__m512bh)_mm512_loadu_si512(weights + o * width + i);
        for (int t = 0; t < T; t++) {
            const __m512bh token = (__m512bh)_mm512_loadu_si512(x + t * columns + i);
            for (int o = 0; o < GROUP; o++) sum[t][o] = _mm512_dpbf16_ps(sum[t][o], token, weight[o]);
        }
    }
    round_sums<T>(sum, out, stride, rows);
}

// `tile` of rows as codes, which are left in `held`, decoded, where that is not null. The rows after them are asked for.
template <int T>
inline void tile_of_codes(const Number* x, const Coded& of, int64_t weight, int64_t row, Number* held, int64_t width, uint16_t* out, int64_t stride) {
    const Values values = values_of(of.table);
    const uint8_t* codes = of.row(weight, row);
    const float* scales = of.row_scales(weight, row);
    const int64_t columns = of.columns, apart = columns / of.block;
    __m512 sum[T][GROUP];
    for (int t = 0; t < T; t++)
        for (int o = 0; o < GROUP; o++) sum[t][o] = _mm512_setzero_ps();
    for (int64_t start = 0; start < columns; start += of.block, scales++) {
        __m512i weights[GROUP];
        for (int o = 0; o < GROUP; o++) weights[o] = weights_of(values, scales[o * apart]);
        for (int64_t i = start; i < start + of.block; i += 32) {
            // A line holds the codes of four steps.
            _mm_prefetch((const char*)codes + ((GROUP + i / 32 % GROUP) * columns + i) / 2, _MM_HINT_T0);
            __m512i some[GROUP];
            for (int o = 0; o < GROUP; o++) {
                some[o] = picked(codes + (o * columns + i) / 2, weights[o]);
                if (held) _mm512_storeu_si512(held + o * width + i, some[o]);
            }
            for (int t = 0; t < T; t++) {
                const __m512bh token = (__m512bh)_mm512_loadu_si512(x + t * columns + i);
                for (int o = 0; o < GROUP; o++) sum[t][o] = _mm512_dpbf16_ps(sum[t][o], token, (__m512bh)some[o]);
            }
        }
    }
    round_sums<T>(sum, out, stride, GROUP);
}

// At most T tokens.
template <int T>
inline void first_tokens(int64_t count, const Number* x, const Coded& of, int64_t weight, int64_t row, Number* held, int64_t width, uint16_t* out,
                         int64_t stride) {
    if constexpr (T > 0) {
        if (count == T)
            tile_of_codes<T>(x, of, weight, row, held, width, out, stride);
        else
            first_tokens<T - 1>(count, x, of, weight, row, held, width, out, stride);
    }
}

// Rows first to last are decoded into `held`, and multiplied with some tokens; how many of them, none where decoding by itself is no slower.
inline int64_t opened(const Coded& of, int64_t weight, int64_t first, int64_t last, Number* held, int64_t width, const Number* x, int64_t tokens,
                      uint16_t* out, int64_t stride) {
    if (tokens > OPENED || (last - first) % GROUP) return 0;
    const int64_t over = tokens % TOKENS, count = tokens < TOKENS ? tokens : over < 3 ? over + 3 : over;
    for (int64_t row = first; row < last; row += GROUP, held += GROUP * width)
        first_tokens<TOKENS - 1>(count, x, of, weight, row, count < tokens ? held : nullptr, width, out + row, stride);
    return count;
}

// PANEL columns of rows first to last, an even number of them: of each two rows the numbers of a column side by side.
inline void decode_panel(const Coded& of, int64_t first, int64_t last, int64_t column, Number* out) {
    uint16_t places[64];
    for (int i = 0; i < 64; i++) places[i] = (uint16_t)(i / 2 + i % 2 * 32);
    const __m512i low = _mm512_loadu_si512(places), high = _mm512_loadu_si512(places + 32);
    const Values values = values_of(of.table);
    for (int64_t row = first; row < last; row += 2, out += 2 * PANEL)
        for (int64_t i = 0; i < PANEL; i += 32) {
            __m512i half[2];
            for (int k = 0; k < 2; k++)
                half[k] = picked(of.row(0, row + k) + (column + i) / 2, weights_of(values, of.row_scales(0, row + k)[(column + i) / of.block]));
            _mm512_storeu_si512(out + 2 * i, _mm512_permutex2var_epi16(half[0], low, half[1]));
            _mm512_storeu_si512(out + 2 * i + 32, _mm512_permutex2var_epi16(half[0], high, half[1]));
        }
}

// T rows of a gradient, and a panel of so many rows of a weight: sums [T, PANEL] go on from where they are.
template <int T>
inline void tile_back(const Number* gradient, int64_t stride, const Number* panel, int64_t rows, float* sums) {
    constexpr int PARTS = PANEL / 16;
    __m512 sum[T][PARTS];
    for (int t = 0; t < T; t++)
        for (int c = 0; c < PARTS; c++) sum[t][c] = _mm512_loadu_ps(sums + t * PANEL + c * 16);
    for (int64_t pair = 0; pair < rows / 2; pair++) {
        __m512bh weight[PARTS];
        for (int c = 0; c < PARTS; c++) weight[c] = (__m512bh)_mm512_loadu_si512(panel + pair * 2 * PANEL + c * 32);
        for (int t = 0; t < T; t++) {
            const __m512bh both = (__m512bh)_mm512_set1_epi32(((const int*)(gradient + t * stride))[pair]);
            for (int c = 0; c < PARTS; c++) sum[t][c] = _mm512_dpbf16_ps(sum[t][c], both, weight[c]);
        }
    }
    for (int t = 0; t < T; t++)
        for (int c = 0; c < PARTS; c++) _mm512_storeu_ps(sums + t * PANEL + c * 16, sum[t][c]);
}

inline const Number* prepared(const uint16_t* x, Number*, int64_t, int64_t) { return x; }

inline void in_order(const Number* row, int64_t columns, uint16_t* out) { std::copy(row, row + columns, out); }

inline const Number* four_rows(const uint16_t* rows, int64_t, Number*) { return rows; }

// B [16 groups, R] as pairs of neighbours in R, those of 16 outputs side by side: what one instruction adds up.
inline void turned(const uint16_t* b, int64_t groups, int64_t rank, Number* out) {
    const uint32_t* pairs = (const uint32_t*)b;
    const int64_t count = rank / 2;
    for (int64_t half = 0; half < 2 * groups; half++) {
        const uint32_t* from = pairs + half * 8 * count;
        uint32_t* to = (uint32_t*)out + half / 2 * count * 16 + half % 2 * 8;
        int64_t r = 0;
        for (; r + 8 <= count; r += 8) {
            __m256i rows[8];
            for (int64_t o = 0; o < 8; o++) rows[o] = _mm256_loadu_si256((const __m256i*)(from + o * count + r));
            turned_8x8(rows, to + r * 16, 16);
        }
        for (; r < count; r++)
            for (int64_t o = 0; o < 8; o++) to[r * 16 + o] = from[o * count + r];
    }
}

// T tokens: y [T, 16 G] += scale * bf16(B low).
template <int T, int G>
inline void add_up(const uint16_t* low, int64_t width, const Number* b, int64_t rank, float scale, uint16_t* y, int64_t stride) {
    const auto wide = [](__m256i x) { return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(x), 16)); };
    __m512 sum[T][G];
    for (int t = 0; t < T; t++)
        for (int g = 0; g < G; g++) sum[t][g] = _mm512_setzero_ps();
    for (int64_t r = 0; r < rank / 2; r++) {
        __m512bh weight[G];
        for (int g = 0; g < G; g++) weight[g] = (__m512bh)_mm512_loadu_si512(b + (g * (rank / 2) + r) * 32);
        for (int t = 0; t < T; t++) {
            const __m512bh pair = (__m512bh)_mm512_set1_epi32(((const int*)(low + t * width))[r]);
            for (int g = 0; g < G; g++) sum[t][g] = _mm512_dpbf16_ps(sum[t][g], pair, weight[g]);
        }
    }
    for (int t = 0; t < T; t++)
        for (int g = 0; g < G; g++) {
            uint16_t* place = y + t * stride + g * 16;
            const __m256i part = (__m256i)_mm512_cvtneps_pbh(sum[t][g]), before = _mm256_loadu_si256((const __m256i*)place);
            const __m512 all = _mm512_fmadd_ps(wide(part), _mm512_set1_ps(scale), wide(before));
            _mm256_storeu_si256((__m256i*)place, (__m256i)_mm512_cvtneps_pbh(all));
        }
}

#else

using Number = float;
constexpr int TOKENS = 3, ADDED = 3, BACK = 6;
struct Values {
    __m256 low, high;
};

inline Values values_of(const float* table) { return {_mm256_loadu_ps(table), _mm256_loadu_ps(table + 8)}; }

// To the nearest bf16, ties to even.
inline __m256 rounded(__m256 x) {
    const __m256i bits = _mm256_castps_si256(x);
    const __m256i odd = _mm256_and_si256(_mm256_srli_epi32(bits, 16), _mm256_set1_epi32(1));
    const __m256i up = _mm256_add_epi32(bits, _mm256_add_epi32(odd, _mm256_set1_epi32(0x7fff)));
    return _mm256_castsi256_ps(_mm256_and_si256(up, _mm256_set1_epi32((int)0xffff0000)));
}

inline __m256 picked(Values weights, __m256i codes, __m256i sign) {
    const __m256 low = _mm256_permutevar8x32_ps(weights.low, codes), high = _mm256_permutevar8x32_ps(weights.high, codes);
    return _mm256_blendv_ps(low, high, _mm256_castsi256_ps(sign));
}

// One row [I], in an order of its own: of each 16, the even ones before the odd ones; `read_plain` puts tokens into the same.
inline void decode(const uint8_t* codes, const float* scales, Values values, int64_t columns, int64_t block, Number* out) {
    for (int64_t start = 0; start < columns; start += block) {
        const __m256 scale = _mm256_set1_ps(*scales++);
        const Values weights = {rounded(_mm256_mul_ps(values.low, scale)), rounded(_mm256_mul_ps(values.high, scale))};
        for (int64_t i = start; i < start + block; i += 16) {
            const __m256i bytes = _mm256_cvtepu8_epi32(_mm_loadl_epi64((const __m128i*)(codes + i / 2)));
            _mm256_storeu_ps(out + i, picked(weights, _mm256_srli_epi32(bytes, 4), _mm256_slli_epi32(bytes, 24)));
            _mm256_storeu_ps(out + i + 8, picked(weights, bytes, _mm256_slli_epi32(bytes, 28)));
        }
    }
}

template <int T>
inline void tile(const Number* x, const Number* weights, int64_t columns, int64_t width, uint16_t* out, int64_t stride, int rows) {
    __m256 sum[T][GROUP];
    for (int t = 0; t < T; t++)
        for (int o = 0; o < GROUP; o++) sum[t][o] = _mm256_setzero_ps();
    for (int64_t i = 0; i < columns; i += 8) {
        __m256 token[T];
        for (int t = 0; t < T; t++) token[t] = _mm256_loadu_ps(x + t * columns + i);
        for (int o = 0; o < GROUP; o++) {
            const __m256 weight = _mm256_loadu_ps(weights + o * width + i);
            for (int t = 0; t < T; t++) sum[t][o] = _mm256_fmadd_ps(token[t], weight, sum[t][o]);
        }
    }
    for (int t = 0; t < T; t++) {
        const __m256 all = _mm256_hadd_ps(_mm256_hadd_ps(sum[t][0], sum[t][1]), _mm256_hadd_ps(sum[t][2], sum[t][3]));
        uint32_t found[8];
        _mm256_storeu_ps((float*)found, rounded(_mm256_add_ps(all, _mm256_permute2f128_ps(all, all, 1))));
        for (int o = 0; o < rows; o++) out[t * stride + o] = (uint16_t)(found[o] >> 16);
    }
}

// PANEL columns of rows first to last, 16 columns after the other; rows in the order of `read_plain`, to which a gradient is brought.
inline void decode_panel(const Coded& of, int64_t first, int64_t last, int64_t column, Number* out) {
    const Values values = values_of(of.table);
    for (int64_t row = first; row < last; row++) {
        const int64_t at = row - first, place = at / 16 * 16 + at % 2 * 8 + at % 16 / 2;
        for (int64_t i = 0; i < PANEL; i += 16) {
            const __m256 scale = _mm256_set1_ps(of.row_scales(0, row)[(column + i) / of.block]);
            const Values weights = {rounded(_mm256_mul_ps(values.low, scale)), rounded(_mm256_mul_ps(values.high, scale))};
            const __m256i bytes = _mm256_cvtepu8_epi32(_mm_loadl_epi64((const __m128i*)(of.row(0, row) + (column + i) / 2)));
            const __m256 even = picked(weights, _mm256_srli_epi32(bytes, 4), _mm256_slli_epi32(bytes, 24));
            const __m256 odd = picked(weights, bytes, _mm256_slli_epi32(bytes, 28));
            const __m256 low = _mm256_unpacklo_ps(even, odd), high = _mm256_unpackhi_ps(even, odd);
            Number* to = out + i * (last - first) + place * 16;
            _mm256_storeu_ps(to, _mm256_permute2f128_ps(low, high, 0x20));
            _mm256_storeu_ps(to + 8, _mm256_permute2f128_ps(low, high, 0x31));
        }
    }
}

template <int T>
inline void tile_back(const Number* gradient, int64_t stride, const Number* panel, int64_t rows, float* sums) {
    for (int64_t c = 0; c < PANEL; c += 16, panel += 16 * rows) {
        __m256 sum[T][2];
        for (int t = 0; t < T; t++)
            for (int half = 0; half < 2; half++) sum[t][half] = _mm256_loadu_ps(sums + t * PANEL + c + 8 * half);
        for (int64_t row = 0; row < rows; row++) {
            const __m256 weight[2] = {_mm256_loadu_ps(panel + row * 16), _mm256_loadu_ps(panel + row * 16 + 8)};
            for (int t = 0; t < T; t++) {
                const __m256 own = _mm256_broadcast_ss(gradient + t * stride + row);
                for (int half = 0; half < 2; half++) sum[t][half] = _mm256_fmadd_ps(own, weight[half], sum[t][half]);
            }
        }
        for (int t = 0; t < T; t++)
            for (int half = 0; half < 2; half++) _mm256_storeu_ps(sums + t * PANEL + c + 8 * half, sum[t][half]);
    }
}

// There are no registers left.
inline int64_t opened(const Coded&, int64_t, int64_t, int64_t, Number*, int64_t, const Number*, int64_t, uint16_t*, int64_t) { return 0; }

// A row of bf16 in the order of `decode`.
inline void read_plain(const uint16_t* row, int64_t columns, Number* out) {
    for (int64_t i = 0; i < columns; i += 16) {
        const __m256i pairs = _mm256_loadu_si256((const __m256i*)(row + i));
        _mm256_storeu_ps(out + i, _mm256_castsi256_ps(_mm256_slli_epi32(pairs, 16)));
        _mm256_storeu_ps(out + i + 8, _mm256_castsi256_ps(_mm256_and_si256(pairs, _mm256_set1_epi32((int)0xffff0000))));
    }
}

inline const Number* prepared(const uint16_t* x, Number* room, int64_t tokens, int64_t columns) {
#pragma omp for
    for (int64_t t = 0; t < tokens; t++) read_plain(x + t * columns, columns, room + t * columns);
    return room;
}

inline void in_order(const Number* row, int64_t columns, uint16_t* out) {
    for (int64_t i = 0; i < columns; i += 16)
        for (int64_t k = 0; k < 8; k++) {
            out[i + 2 * k] = (uint16_t)(((const uint32_t*)row)[i + k] >> 16);
            out[i + 2 * k + 1] = (uint16_t)(((const uint32_t*)row)[i + 8 + k] >> 16);
        }
}

inline const Number* four_rows(const uint16_t* rows, int64_t columns, Number* room) {
    for (int64_t o = 0; o < GROUP; o++) read_plain(rows + o * columns, columns, room + o * columns);
    return room;
}

// B [16 groups, R] with its outputs side by side.
inline void turned(const uint16_t* b, int64_t groups, int64_t rank, Number* out) {
    for (int64_t half = 0; half < 2 * groups; half++) {
        const uint16_t* from = b + half * 8 * rank;
        float* to = out + half / 2 * rank * 16 + half % 2 * 8;
        int64_t r = 0;
        for (; r + 8 <= rank; r += 8) {
            __m256i rows[8];
            for (int64_t o = 0; o < 8; o++) rows[o] = _mm256_slli_epi32(_mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i*)(from + o * rank + r))), 16);
            turned_8x8(rows, (uint32_t*)(to + r * 16), 16);
        }
        for (; r < rank; r++)
            for (int64_t o = 0; o < 8; o++) to[r * 16 + o] = wide(from[o * rank + r]);
    }
}

// T tokens: y [T, 16 G] += scale * bf16(B low), group by group; the registers are few.
template <int T, int G>
inline void add_up(const uint16_t* low, int64_t width, const Number* b, int64_t rank, float scale, uint16_t* y, int64_t stride) {
    const __m256 by = _mm256_set1_ps(scale);
    for (int g = 0; g < G; g++) {
        __m256 sum[T][2];
        for (int t = 0; t < T; t++) sum[t][0] = sum[t][1] = _mm256_setzero_ps();
        for (int64_t r = 0; r < rank; r++) {
            const float* row = b + (g * rank + r) * 16;
            const __m256 weight[2] = {_mm256_loadu_ps(row), _mm256_loadu_ps(row + 8)};
            for (int t = 0; t < T; t++) {
                const __m256 own = _mm256_set1_ps(wide(low[t * width + r]));
                for (int half = 0; half < 2; half++) sum[t][half] = _mm256_fmadd_ps(own, weight[half], sum[t][half]);
            }
        }
        for (int t = 0; t < T; t++)
            for (int half = 0; half < 2; half++) {
                uint16_t* place = y + t * stride + g * 16 + 8 * half;
                const __m256i before = _mm256_slli_epi32(_mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i*)place)), 16);
                const __m256i all = _mm256_castps_si256(rounded(_mm256_fmadd_ps(rounded(sum[t][half]), by, _mm256_castsi256_ps(before))));
                const __m256i words = _mm256_permute4x64_epi64(_mm256_packus_epi32(_mm256_srli_epi32(all, 16), all), 0x08);
                _mm_storeu_si128((__m128i*)place, _mm256_castsi256_si128(words));
            }
    }
}

#endif

// As many tokens as are left, at most T.
template <int T>
inline void up_to(int64_t left, const Number* x, const Number* weights, int64_t columns, int64_t width, uint16_t* out, int64_t stride, int rows) {
    if constexpr (T > 0) {
        if (left == T)
            tile<T>(x, weights, columns, width, out, stride, rows);
        else
            up_to<T - 1>(left, x, weights, columns, width, out, stride, rows);
    }
}

// Memory of this thread, kept from call to call.
inline Number* room_for(std::vector<Line>& lines, int64_t numbers) {
    const size_t needed = (numbers * sizeof(Number) + sizeof(Line) - 1) / sizeof(Line);
    if (lines.size() < needed) {
        lines.clear();  // nothing is to be copied
        lines.resize(needed);
    }
    return (Number*)lines.data();
}

// What a long prompt took is not kept for steps of a few tokens.
inline void give_back(std::vector<Line>& lines) {
    if (lines.size() * sizeof(Line) > KEPT_BYTES) std::vector<Line>().swap(lines);
}

thread_local std::vector<Line> decoded_rows, prepared_tokens;

inline void read(const Coded& of, int64_t weight, int64_t row, Number* out) {
    decode(of.row(weight, row), of.row_scales(weight, row), values_of(of.table), of.columns, of.block, out);
}

// Weights [O, I], each times tokens starts[p] to starts[p + 1].
void multiply(int64_t weights, const Coded& of, const int64_t* starts, const uint16_t* x, uint16_t* out, int64_t rows, int64_t columns, int threads) {
    const int64_t width = columns + LINE / (int64_t)sizeof(Number), tokens = starts[weights];
    const int64_t held = std::clamp<int64_t>(HELD_BYTES / (width * (int64_t)sizeof(Number)) / GROUP, 1, MOST_GROUPS) * GROUP;
    const int64_t groups = (rows + held - 1) / held, bytes = of.at(0, held) - of.at(0, 0);
    const bool is_few = tokens <= FEW * weights, asks = is_few && bytes <= HELD_BYTES;
    // So many at a time that the next one is mostly a thread's own, and so few that threads end together.
    const int64_t chunk = is_few ? std::clamp<int64_t>(weights * groups / (4 * threads), 1, 8) : 2;
    Number* shared = sizeof(Number) == sizeof(float) ? room_for(prepared_tokens, tokens * columns) : nullptr;
#pragma omp parallel num_threads(threads)
    {
        Number* own = room_for(decoded_rows, held * width);
        const Number* all = prepared(x, shared, tokens, columns);
#pragma omp for schedule(dynamic, chunk)
        for (int64_t number = 0; number < weights * groups; number++) {
            const int64_t weight = number / groups, first = number % groups * held, last = std::min(first + held, rows);
            const int64_t from = starts[weight], until = starts[weight + 1];
            if (from == until) continue;
            const int64_t done = opened(of, weight, first, last, own, width, all + from * columns, until - from, out + from * rows, rows);
            if (!done)
                for (int64_t row = first; row < last; row++) read(of, weight, row, own + (row - first) * width);
            const char* next = of.at(weight, last);
            const char* end = asks && !done ? of.at(weight, std::min(last + held, rows)) : next;
            const int64_t part = (end - next) * TOKENS / (until - from) + LINE;
            for (int64_t t = from + done; t < until; t += TOKENS) {
                const int64_t left = std::min<int64_t>(TOKENS, until - t);
                for (const char* stop = std::min(next + part, end); next < stop; next += LINE) _mm_prefetch(next, _MM_HINT_T0);
                for (int64_t row = first; row < last; row += GROUP) {
                    up_to<TOKENS>(left, all + t * columns, own + (row - first) * width, columns, width, out + t * rows + row, rows,
                                 (int)std::min<int64_t>(GROUP, last - row));
                }
            }
        }
    }
    give_back(prepared_tokens);
}

// As many rows of a gradient as are left, at most T.
template <int T>
inline void back_up_to(int64_t left, const Number* gradient, int64_t stride, const Number* panel, int64_t rows, float* sums) {
    if constexpr (T > 0) {
        if (left == T)
            tile_back<T>(gradient, stride, panel, rows, sums);
        else
            back_up_to<T - 1>(left, gradient, stride, panel, rows, sums);
    }
}

// A gradient [T, O] times the first weight [O, I]; threads share its columns.
inline void multiply_back(const Coded& of, const uint16_t* gradient, uint16_t* out, int64_t tokens, int64_t rows, int threads) {
    const int64_t most = std::min(rows, PANEL_ROWS);
    Number* shared = sizeof(Number) == sizeof(float) ? room_for(prepared_tokens, tokens * rows) : nullptr;
#pragma omp parallel num_threads(threads)
    {
        // Behind the weights of a panel its sums.
        Number* panel = room_for(decoded_rows, (most + tokens * (int64_t)(sizeof(float) / sizeof(Number))) * PANEL);
        float* sums = (float*)(panel + most * PANEL);
        const Number* all = prepared(gradient, shared, tokens, rows);
#pragma omp for schedule(dynamic)
        for (int64_t column = 0; column < of.columns; column += PANEL) {
            std::fill(sums, sums + tokens * PANEL, 0.0f);
            for (int64_t first = 0; first < rows; first += most) {
                const int64_t last = std::min(first + most, rows);
                decode_panel(of, first, last, column, panel);
                for (int64_t t = 0; t < tokens; t += BACK)
                    back_up_to<BACK>(std::min<int64_t>(BACK, tokens - t), all + t * rows + first, rows, panel, last - first, sums + t * PANEL);
            }
            for (int64_t t = 0; t < tokens; t++)
                for (int64_t i = 0; i < PANEL; i++) out[t * of.columns + column + i] = narrow(sums[t * PANEL + i]);
        }
        give_back(decoded_rows);
    }
    give_back(prepared_tokens);
}

}  // namespace

extern "C" {

// Each of several 4-bit weights [O, I] of one shape times its own tokens: weight p those from starts[p] to starts[p + 1].
//
// codes, scales: by weight, O * I / 2 bytes and O * I / block numbers; table: what the 16 codes mean; x: bf16 [T, I]; out: bf16 [T, O].
void qlora_rl_multiply(int64_t weights, const uint8_t* const* codes, const float* const* scales, const int64_t* starts, const float* table,
                       const uint16_t* x, uint16_t* out, int64_t rows, int64_t columns, int64_t block, int threads) {
    const Coded of{codes, scales, table, columns, block};
    const int64_t chunk = std::max<int64_t>(CHUNK_BYTES / (columns * (int64_t)sizeof(Number)) / TOKENS, 1) * TOKENS;
    if (weights > 1 || starts[1] <= chunk) return multiply(weights, of, starts, x, out, rows, columns, threads);
    for (int64_t first = 0; first < starts[1]; first += chunk) {
        const int64_t some[2] = {0, std::min(chunk, starts[1] - first)};
        multiply(1, of, some, x + first * columns, out + first * rows, rows, columns, threads);
    }
}

// A gradient [T, O] times a 4-bit weight [O, I], bf16 [T, I]; O is a multiple of 16, I of PANEL.
void qlora_rl_multiply_back(const uint8_t* codes, const float* scales, const float* table, const uint16_t* gradient, uint16_t* out, int64_t tokens,
                            int64_t rows, int64_t columns, int64_t block, int threads) {
    const int64_t most = std::min((int64_t)KEPT_BYTES / (rows * (int64_t)sizeof(Number)), MOST_SUMS);
    const int64_t chunk = std::max<int64_t>(most / BACK, 1) * BACK;
    for (int64_t first = 0; first < tokens; first += chunk)
        multiply_back(Coded{&codes, &scales, table, columns, block}, gradient + first * rows, out + first * columns, std::min(chunk, tokens - first), rows,
                      threads);
}

// A x of an adapter of N parts, rounded to bf16 as a 16-bit product is.
//
// a: by part, bf16 [R, I]; x: bf16 [T, I]; low: bf16 [T, N R].
void qlora_rl_adapter_low(int64_t parts, const uint16_t* const* a, int64_t rank, const uint16_t* x, uint16_t* low, int64_t tokens, int64_t columns,
                          int threads) {
    const int64_t width = parts * rank, chunk = 8 * TOKENS, chunks = (tokens + chunk - 1) / chunk;
    Number* shared = sizeof(Number) == sizeof(float) ? room_for(prepared_tokens, tokens * columns) : nullptr;
#pragma omp parallel num_threads(threads)
    {
        Number* own = room_for(decoded_rows, GROUP * columns);
        const Number* all = prepared(x, shared, tokens, columns);
#pragma omp for
        for (int64_t number = 0; number < width / GROUP * chunks; number++) {
            const int64_t row = number / chunks * GROUP, first = number % chunks * chunk, last = std::min(first + chunk, tokens);
            const Number* rows = four_rows(a[row / rank] + row % rank * columns, columns, own);
            for (int64_t t = first; t < last; t += TOKENS)
                up_to<TOKENS>(std::min<int64_t>(TOKENS, last - t), all + t * columns, rows, columns, columns, low + t * width + row, width, GROUP);
        }
    }
    give_back(prepared_tokens);
}

// y [T, O] += scale * B low of an adapter of N parts, each part rounded to bf16 before it is added.
//
// b: by part, bf16 [outputs[n], R]; low: bf16 [T, N R]; y: bf16 [T, O].
void qlora_rl_adapter_add(int64_t parts, const uint16_t* const* b, const int64_t* outputs, int64_t rank, const uint16_t* low, uint16_t* y,
                          int64_t tokens, float scale, int threads) {
    const int64_t width = parts * rank;
    int64_t stride = 0, blocks = 0;
    for (int64_t n = 0; n < parts; n++) {
        stride += outputs[n];
        blocks += (outputs[n] + OUTPUTS - 1) / OUTPUTS;
    }
#pragma omp parallel num_threads(threads)
    {
        Number* own = room_for(decoded_rows, OUTPUTS * rank);
#pragma omp for
        for (int64_t number = 0; number < blocks; number++) {
            int64_t part = 0, block = number, before = 0;
            for (; block >= (outputs[part] + OUTPUTS - 1) / OUTPUTS; part++) {
                block -= (outputs[part] + OUTPUTS - 1) / OUTPUTS;
                before += outputs[part];
            }
            const int64_t first = block * OUTPUTS, groups = std::min(OUTPUTS, outputs[part] - first) / 16;
            turned(b[part] + first * rank, groups, rank, own);
            const auto add = [&](auto count, int64_t t) {
                constexpr int T = decltype(count)::value;
                const uint16_t* of_part = low + t * width + part * rank;
                uint16_t* place = y + t * stride + before + first;
                if (groups == OUTPUTS / 16)
                    add_up<T, OUTPUTS / 16>(of_part, width, own, rank, scale, place, stride);
                else
                    for (int64_t g = 0; g < groups; g++) add_up<T, 1>(of_part, width, own + g * 16 * rank, rank, scale, place + g * 16, stride);
            };
            int64_t t = 0;
            for (; t + ADDED <= tokens; t += ADDED) add(std::integral_constant<int, ADDED>(), t);
            for (; t < tokens; t++) add(std::integral_constant<int, 1>(), t);
        }
    }
}

// Norm by the root mean square, out [T, I], rounded to bf16 before and after the weight [I] as torch's operators do; the bits of a token depend on
// it alone. With `residual` [T, I] the norm is of x + residual, and that sum, rounded, takes its place.
void qlora_rl_norm(const uint16_t* x, uint16_t* residual, const uint16_t* weight, uint16_t* out, int64_t tokens, int64_t columns, float epsilon,
                   int threads) {
#pragma omp parallel num_threads(tokens * columns < NORMED ? 1 : threads)
    {
        float* sum = (float*)room_for(decoded_rows, (columns + LANES) * sizeof(float) / sizeof(Number));
#pragma omp for
        for (int64_t t = 0; t < tokens; t++) {
            const uint16_t* from = x + t * columns;
            uint16_t* left = residual ? residual + t * columns : nullptr;
            uint16_t* to = out + t * columns;
            for (int64_t i = 0; i < columns; i++) sum[i] = wide(from[i]);
            if (left)
                for (int64_t i = 0; i < columns; i++) {
                    sum[i] += wide(left[i]);
                    left[i] = narrow(sum[i]);
                }
            for (int64_t i = columns; i < columns + LANES; i++) sum[i] = 0;
            float squares[LANES] = {};
            for (int64_t i = 0; i < columns; i += LANES)
                for (int64_t l = 0; l < LANES; l++) squares[l] += sum[i + l] * sum[i + l];
            for (int64_t half = LANES / 2; half; half /= 2)
                for (int64_t l = 0; l < half; l++) squares[l] += squares[l + half];
            const float by = 1.0f / std::sqrt(squares[0] / (float)columns + epsilon);
            for (int64_t i = 0; i < columns; i++) to[i] = narrow(wide(narrow(sum[i] * by)) * wide(weight[i]));
        }
    }
}

// The weight itself, bf16 [O, I].
void qlora_rl_decode(const uint8_t* codes, const float* scales, const float* table, uint16_t* out, int64_t rows, int64_t columns, int64_t block,
                     int threads) {
#pragma omp parallel num_threads(threads)
    {
        Number* own = room_for(decoded_rows, columns);
        const Values values = values_of(table);
#pragma omp for
        for (int64_t o = 0; o < rows; o++) {
            decode(codes + o * columns / 2, scales + o * columns / block, values, columns, block, own);
            in_order(own, columns, out + o * columns);
        }
    }
}
}
