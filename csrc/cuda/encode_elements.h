// The elements that a thread holds, and their amaxes.
#ifndef HYBRIDQ_CUDA_ENCODE_ELEMENTS_H_
#define HYBRIDQ_CUDA_ENCODE_ELEMENTS_H_

#include "cuda/encode_args.h"

HQ_NAMESPACE_BEGIN

namespace cuda {

// A pass that finds an amax leaves x in the L2 cache, as far as it fits, for the pass that encodes;
// that one says that nobody will ask for x again.
template <bool kIsReadAgain, class T>
HQ_DEVICE T LoadElements(const T* p) {
  if constexpr (kIsReadAgain) {
    return Load(p);
  } else {
    return LoadStreaming(p);
  }
}

// BF16 stays packed, two columns to a register, until it is scaled.
template <int kRows, int kCols, bool kBf16>
struct Elements;

template <int kRows, int kCols>
struct Elements<kRows, kCols, true> {
  uint32_t pair[kRows][kCols / 2];

  HQ_DEVICE float Get(int i, int j) const {
    const uint32_t p = pair[i][j / 2];
    return FromBits(j % 2 == 0 ? p << 16 : p & 0xffff0000u);
  }

  template <bool kIsReadAgain>
  HQ_DEVICE void LoadRow(int i, const void* x, int64_t at, bool) {
    const auto* p = static_cast<const uint16_t*>(x) + at;
    if constexpr (kCols == 4) {
      const Vec2 v = LoadElements<kIsReadAgain>(reinterpret_cast<const Vec2*>(p));
      pair[i][0] = v.x, pair[i][1] = v.y;
    } else {
      HQ_UNROLL
      for (int w = 0; w < kCols / 2; w += 4) {
        const Vec4 v = LoadElements<kIsReadAgain>(reinterpret_cast<const Vec4*>(p + 2 * w));
        pair[i][w] = v.x, pair[i][w + 1] = v.y, pair[i][w + 2] = v.z, pair[i][w + 3] = v.w;
      }
    }
  }

  // By words of two elements, or by elements. The cache keeps the line for those beside.
  template <int kBytes>
  HQ_DEVICE void LoadRowNarrow(int i, const void* x, int64_t at) {
    const auto* p = static_cast<const uint16_t*>(x) + at;
    HQ_UNROLL
    for (int w = 0; w < kCols / 2; ++w) {
      if constexpr (kBytes == 4) {
        pair[i][w] = Load(reinterpret_cast<const uint32_t*>(p) + w);
      } else {
        pair[i][w] = Permute(Load(p + 2 * w), Load(p + 2 * w + 1), 0x5410);
      }
    }
  }
  // The first `count` columns, zeros behind them.
  HQ_DEVICE void LoadRowPart(int i, const void* x, int64_t at, int count, bool) {
    const auto* p = static_cast<const uint16_t*>(x) + at;
    ClearRow(i);
    HQ_UNROLL
    for (int j = 0; j < kCols; ++j) {
      if (j < count) pair[i][j / 2] |= static_cast<uint32_t>(Load(p + j)) << (16 * (j % 2));
    }
  }
  HQ_DEVICE void ConvertParts(bool) {}

  HQ_DEVICE void ClearRow(int i) {
    HQ_UNROLL
    for (int w = 0; w < kCols / 2; ++w) pair[i][w] = 0u;
  }

  // What is computed from the elements on the way to the next plane is computed again: kept from
  // the plane before, it would take more registers than there are.
  HQ_DEVICE void Forget() {
    HQ_UNROLL
    for (int i = 0; i < kRows; ++i) {
      HQ_UNROLL
      for (int w = 0; w < kCols / 2; ++w) pair[i][w] = Opaque(pair[i][w]);
    }
  }

  // The register that has columns kPerMax * w and on of a row.
  HQ_DEVICE uint32_t Word(int i, int w) const { return pair[i][w]; }

  // Magnitudes, two to a register: of rows 2i and 2i + 1, of columns 2i and 2i + 1, of all.
  static constexpr bool kIsBf16 = true;
  using Max = uint32_t;
  static constexpr int kPerMax = 2;
  static HQ_DEVICE Max Larger(Max a, Max b) { return MaxBf16x2(a, b); }
  static HQ_DEVICE int32_t Unpack(Max m, int i) {
    return static_cast<int32_t>(i % 2 == 0 ? m << 16 : m & 0xffff0000u);
  }

  HQ_DEVICE void RowAmaxes(Max (&out)[kRows / 2]) const {
    HQ_UNROLL
    for (int i = 0; i < kRows; i += 2) {
      Max m[2];
      HQ_UNROLL
      for (int r = 0; r < 2; ++r) {
        m[r] = pair[i + r][0] & 0x7fff7fffu;
        HQ_UNROLL
        for (int w = 1; w < kCols / 2; ++w) m[r] = Larger(m[r], pair[i + r][w] & 0x7fff7fffu);
      }
      out[i / 2] = Larger(Permute(m[0], m[1], 0x5410), Permute(m[0], m[1], 0x7632));
    }
  }

  HQ_DEVICE void ColAmaxes(Max (&out)[kCols / 2]) const {
    HQ_UNROLL
    for (int w = 0; w < kCols / 2; ++w) {
      out[w] = pair[0][w] & 0x7fff7fffu;
      HQ_UNROLL
      for (int i = 1; i < kRows; ++i) out[w] = Larger(out[w], pair[i][w] & 0x7fff7fffu);
    }
  }

  HQ_DEVICE int32_t MaxOfAll() const {
    Max m[kCols / 2];
    ColAmaxes(m);
    HQ_UNROLL
    for (int w = 1; w < kCols / 2; ++w) m[0] = Larger(m[0], m[w]);
    return MaxInt(Unpack(m[0], 0), Unpack(m[0], 1));
  }
};

template <int kRows, int kCols>
struct Elements<kRows, kCols, false> {
  float value[kRows][kCols];

  HQ_DEVICE float Get(int i, int j) const { return value[i][j]; }

  template <bool kIsReadAgain>
  HQ_DEVICE void LoadRow(int i, const void* x, int64_t at, bool is_fp16) {
    if (is_fp16) {
      const auto* p = static_cast<const uint16_t*>(x) + at;
      HQ_UNROLL
      for (int j = 0; j < kCols; j += 4) {
        const Vec2 v = LoadElements<kIsReadAgain>(reinterpret_cast<const Vec2*>(p + j));
        value[i][j] = FromFp16(static_cast<uint16_t>(v.x & 0xffffu));
        value[i][j + 1] = FromFp16(static_cast<uint16_t>(v.x >> 16));
        value[i][j + 2] = FromFp16(static_cast<uint16_t>(v.y & 0xffffu));
        value[i][j + 3] = FromFp16(static_cast<uint16_t>(v.y >> 16));
      }
    } else {
      const auto* p = static_cast<const float*>(x) + at;
      HQ_UNROLL
      for (int j = 0; j < kCols; j += 4) {
        const Vec4 v = LoadElements<kIsReadAgain>(reinterpret_cast<const Vec4*>(p + j));
        value[i][j] = FromBits(v.x), value[i][j + 1] = FromBits(v.y);
        value[i][j + 2] = FromBits(v.z), value[i][j + 3] = FromBits(v.w);
      }
    }
  }

  // The first `count` columns, zeros behind them, for ConvertParts.
  HQ_DEVICE void LoadRowPart(int i, const void* x, int64_t at, int count, bool is_fp16) {
    HQ_UNROLL
    for (int j = 0; j < kCols; ++j) {
      value[i][j] = 0.0f;
      if (j >= count) continue;
      value[i][j] = is_fp16 ? FromBits(Load(static_cast<const uint16_t*>(x) + at + j))
                            : Load(static_cast<const float*>(x) + at + j);
    }
  }
  HQ_DEVICE void ConvertParts(bool is_fp16) {
    if (!is_fp16) return;
    HQ_UNROLL
    for (int i = 0; i < kRows; ++i) {
      HQ_UNROLL
      for (int j = 0; j < kCols; ++j) {
        value[i][j] = FromFp16(static_cast<uint16_t>(Bits(value[i][j])));
      }
    }
  }

  HQ_DEVICE void ClearRow(int i) {
    HQ_UNROLL
    for (int j = 0; j < kCols; ++j) value[i][j] = 0.0f;
  }

  HQ_DEVICE int32_t Word(int i, int w) const { return SignedBits(value[i][w]); }

  HQ_DEVICE void Forget() {}  // each has a register of its own anyway

  static constexpr bool kIsBf16 = false;
  using Max = int32_t;
  static constexpr int kPerMax = 1;
  static HQ_DEVICE Max Larger(Max a, Max b) { return MaxInt(a, b); }
  static HQ_DEVICE int32_t Unpack(Max m, int) { return m; }

  HQ_DEVICE void RowAmaxes(Max (&out)[kRows]) const {
    HQ_UNROLL
    for (int i = 0; i < kRows; ++i) {
      out[i] = Magnitude(value[i][0]);
      HQ_UNROLL
      for (int j = 1; j < kCols; ++j) out[i] = MaxInt(out[i], Magnitude(value[i][j]));
    }
  }

  HQ_DEVICE void ColAmaxes(Max (&out)[kCols]) const {
    HQ_UNROLL
    for (int j = 0; j < kCols; ++j) {
      out[j] = Magnitude(value[0][j]);
      HQ_UNROLL
      for (int i = 1; i < kRows; ++i) out[j] = MaxInt(out[j], Magnitude(value[i][j]));
    }
  }

  HQ_DEVICE int32_t MaxOfAll() const {
    Max m[kCols];
    ColAmaxes(m);
    HQ_UNROLL
    for (int j = 1; j < kCols; ++j) m[0] = MaxInt(m[0], m[j]);
    return m[0];
  }
};

}  // namespace cuda

HQ_NAMESPACE_END

#endif  // HYBRIDQ_CUDA_ENCODE_ELEMENTS_H_
