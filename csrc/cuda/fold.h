// Fold: MX planes (E8M0 scales) as FP8 planes with one power-of-two FP32 scale per 1x128 or
// 128x128, for tensor cores that have no 1x32 scales.
//
// A group's scale is 2^(E - 127 - lift), E its largest scale byte without NaN bytes (0 if there is
// no other) and lift the room of the element in its target; a code becomes
// cast(code * 2^(e - E + lift)). Codes of NaN blocks and NaN codes become the NaN code, infinities
// stay. Finite codes that change their value are counted. docs/reference/numerics.md, "Fold".
//
// The fast kernels move exponents four codes at a time: while the result is normal, a code times
// 2^-d is the code minus d in its exponent field. What falls into the subnormals, and what is no
// finite number, takes the other path, by formats/element.h.
#ifndef HYBRIDQ_CUDA_FOLD_H_
#define HYBRIDQ_CUDA_FOLD_H_

#include "cuda/common.h"
#include "cuda/fold_scale.h"
#include "formats/e8m0.h"

HQ_NAMESPACE_BEGIN

namespace cuda {

inline constexpr int kFoldThreads = 256;
inline constexpr int kFoldWarps = kFoldThreads / 32;
inline constexpr int kFoldWidth = 128;                                      // columns of a group
inline constexpr int kFoldCodes = 16;                                       // per vector
inline constexpr int kFoldUnroll = 4;                                       // vectors per thread
inline constexpr int kFoldRows = kFoldThreads / (kFoldWidth / kFoldCodes);  // at once

struct FoldArgs {
  const uint8_t* data;
  const uint8_t* scale;
  uint8_t* codes;
  float* out_scale;
  unsigned long long* changed;
  int64_t rows, k;
  int64_t data_stride, scale_stride;
  int64_t out_stride_row, out_stride_k;  // of out_scale
  int64_t groups;                        // per row
  int64_t steps;                         // blocks along K
  uint32_t row_shift, col_shift;         // log2 of a block's rows and columns
  int32_t height;
};

template <class E>
struct FoldTarget {
  using Type = E4M3;
};
template <>
struct FoldTarget<E5M2> {
  using Type = E5M2;
};

// floor(log2(target's maximum / element's maximum)).
template <class E>
struct FoldLift {
  static constexpr int32_t kTop = Derived<typename FoldTarget<E>::Type>::kMaxBits;
  static constexpr int32_t kOwn = Derived<E>::kMaxBits;
  static constexpr int kExponents = (kTop >> 23) - (kOwn >> 23);
  static constexpr int kLift = (kTop & 0x7fffff) < (kOwn & 0x7fffff) ? kExponents - 1 : kExponents;
};

// What a block's codes are multiplied with: exact, and where it is cut off every code rounds to 0.
HQ_DEVICE float FoldMultiplier(int32_t byte, int32_t largest, int lift) {
  const int32_t exponent = MaxInt(byte - largest + lift, -100);
  return FromSignedBits((exponent + 127) << 23);
}

template <class E>
struct FoldedCode {
  uint32_t code;
  uint32_t is_changed;
};
template <class E>
HQ_DEVICE FoldedCode<E> FoldOne(uint32_t code, int32_t byte, int32_t largest) {
  using T = typename FoldTarget<E>::Type;
  const float value = Decode<E>(code);
  const float shifted = MulRn(value, FoldMultiplier(byte, largest, FoldLift<E>::kLift));
  if (byte == kE8m0Nan || IsNan(value)) return {T::kNanCode, 0u};
  if (Magnitude(value) == kInfBits) return {code, 0u};
  const uint32_t folded = Cast<T>(shifted);
  return {folded, Decode<T>(folded) == shifted ? 0u : 1u};
}

HQ_DEVICE void PutChanged(uint32_t changed, unsigned long long* counter) {
  if (!Any(changed != 0)) return;
  for (int mask = 16; mask > 0; mask /= 2) changed += ShuffleXor(changed, mask);
  if (Lane() == 0) AtomicAdd(counter, static_cast<unsigned long long>(changed));
}

// ---- by exponents

// Sixteen codes, one per byte, as codes of the target.
template <class E>
HQ_DEVICE Vec4 LoadFoldCodes(const uint8_t* p) {
  if constexpr (E::kBits == 8) return LoadStreaming(reinterpret_cast<const Vec4*>(p));
  // Four nibbles become bytes by one lookup each for the magnitudes; bit 3 of a nibble is the sign,
  // which must not reach the selector, where it means something else.
  const Vec2 packed = LoadStreaming(reinterpret_cast<const Vec2*>(p));
  constexpr uint32_t kLow = 0x6c686000u, kHigh = 0x7c787470u;  // E4M3 of 2^6 * E2M1's eight values
  uint32_t out[4];
  HQ_UNROLL
  for (int i = 0; i < 4; ++i) {
    const uint32_t word = i < 2 ? packed.x : packed.y;
    const uint32_t half = i % 2 == 0 ? word : word >> 16;
    // The signs of codes 0 and 2 are moved to where those of codes 1 and 3 are.
    const uint32_t signs = Permute(word << 4, word, i % 2 == 0 ? 0x5140u : 0x7362u);
    out[i] = Permute(kLow, kHigh, half & 0x7777u) | (signs & 0x80808080u);
  }
  return {out[0], out[1], out[2], out[3]};
}

struct Shifted {
  uint32_t word;
  bool is_exact;
};
// Four codes of T times 2^-d: exact if d is 0, or if every result is a normal number or zero.
template <class T>
HQ_DEVICE Shifted ShiftDown(uint32_t word, uint32_t d) {
  constexpr uint32_t kOnes = 0x01010101u, kTops = 0x80808080u;
  constexpr uint32_t kFirstSpecial = T::kInfCode == kNoCode ? T::kFirstNanCode : T::kInfCode;
  const uint32_t magnitude = word & ~kTops;
  const uint32_t special = magnitude + (0x80u - kFirstSpecial) * kOnes;
  const uint32_t nonzero = (magnitude + 0x7fu * kOnes) & kTops;
  const uint32_t step = d << T::kMantissaBits;
  // Bit 7 of a byte stays if its magnitude is at least step + the smallest normal number.
  // Unmoved, subnormal codes stay what they are, too.
  const uint32_t least = d == 0 ? 0u : step + (1u << T::kMantissaBits);
  const uint32_t normal = (magnitude | kTops) - least * kOnes;
  const bool is_exact = ((special & kTops) | (nonzero & ~normal)) == 0;
  return {word - (nonzero >> 7) * step, is_exact};
}

// The group's four bytes as they lie in memory, and their maximum.
struct GroupScales {
  uint32_t bytes;
  int32_t largest;
};
HQ_DEVICE GroupScales LoadGroupScales(const uint8_t* p) {
  const uint32_t bytes = LoadReadOnly(reinterpret_cast<const uint32_t*>(p));
  int32_t largest = 0;
  HQ_UNROLL
  for (int i = 0; i < 4; ++i) {
    largest = MaxInt(largest, WithoutNan(static_cast<int32_t>(bytes >> (8 * i) & 0xffu)));
  }
  return {bytes, largest};
}

// Sixteen codes of one block, folded and stored; returns how many changed.
template <class E>
HQ_DEVICE uint32_t FoldVector(const Vec4& loaded, int32_t byte, int32_t largest,
                              const uint8_t* source, uint8_t* codes) {
  using T = typename FoldTarget<E>::Type;
  const uint32_t d = static_cast<uint32_t>(largest - byte);
  // For larger d no code stays normal; `least` still fits into a byte's magnitude.
  constexpr uint32_t kMostShifts = (1u << T::kExponentBits) - 2;
  const Shifted x = ShiftDown<T>(loaded.x, d), y = ShiftDown<T>(loaded.y, d);
  const Shifted z = ShiftDown<T>(loaded.z, d), w = ShiftDown<T>(loaded.w, d);
  auto* out = reinterpret_cast<Vec4*>(codes);
  const bool is_exact = x.is_exact && y.is_exact && z.is_exact && w.is_exact;
  if (byte != kE8m0Nan && d <= kMostShifts && is_exact) {
    Store(out, Vec4{x.word, y.word, z.word, w.word});
    return 0;
  }
  uint32_t changed = 0, words[4] = {0, 0, 0, 0};
  HQ_UNROLL
  for (int i = 0; i < kFoldCodes; ++i) {
    uint32_t code;
    if constexpr (E::kBits == 4) {
      code = Load(source + i / 2) >> (4 * (i % 2)) & 0xfu;
    } else {
      const uint32_t word = i < 4 ? loaded.x : i < 8 ? loaded.y : i < 12 ? loaded.z : loaded.w;
      code = word >> (8 * (i % 4)) & 0xffu;
    }
    const FoldedCode<E> folded = FoldOne<E>(code, byte, largest);
    words[i / 4] |= folded.code << (8 * (i % 4));
    changed += folded.is_changed;
  }
  Store(out, Vec4{words[0], words[1], words[2], words[3]});
  return changed;
}

// Rows of whole groups, blocks of 1x32, everything aligned. A block of threads takes 32 rows by
// four groups, so that the scales of a group's column are stored 32 in a row; or one square.
template <class E, bool kSquare>
HQ_GLOBAL void HQ_LAUNCH_BOUNDS(kFoldThreads, 3) FoldAligned(FoldArgs a) {
  constexpr uint32_t kLanes = kFoldWidth / kFoldCodes;  // threads of a row's group
  const int64_t step = static_cast<int64_t>(BlockIndex());
  const int64_t down = step / a.steps, along = step - down * a.steps;
  const int64_t row0 = down * (kSquare ? kFoldWidth : kFoldRows) + ThreadIndex() / kLanes;
  const int64_t group0 = along * (kSquare ? 1 : kFoldUnroll);
  const uint32_t chunk = ThreadIndex() % kLanes;
  constexpr uint32_t kBytes = E::kBits == 4 ? kFoldCodes / 2 : kFoldCodes;
  // Vector u: the next group of the row, or of a square 32 rows further down. How many there are.
  const int64_t left = kSquare ? (a.rows - row0 + kFoldRows - 1) / kFoldRows : a.groups - group0;
  const int count = row0 >= a.rows ? 0 : left < kFoldUnroll ? static_cast<int>(left) : kFoldUnroll;
  const uint8_t* const source = a.data + row0 * a.data_stride + (group0 * kLanes + chunk) * kBytes;
  const int64_t source_step = kSquare ? kFoldRows * a.data_stride : kLanes * kBytes;
  const uint8_t* const scale = a.scale + row0 * a.scale_stride + 4 * group0;
  const int64_t scale_step = kSquare ? kFoldRows * a.scale_stride : 4;
  uint8_t* const codes = a.codes + row0 * a.k + (group0 * kLanes + chunk) * kFoldCodes;
  const int64_t codes_step = kSquare ? kFoldRows * a.k : kFoldWidth;
  float* const out_scale =
      a.out_scale + (kSquare ? down : row0) * a.out_stride_row + group0 * a.out_stride_k;
  Vec4 loaded[kFoldUnroll];
  GroupScales scales[kFoldUnroll];
  HQ_UNROLL
  for (int u = 0; u < kFoldUnroll; ++u) {
    loaded[u] = {0, 0, 0, 0};
    scales[u] = {0, 0};
    if (u >= count) continue;
    loaded[u] = LoadFoldCodes<E>(source + u * source_step);
    scales[u] = LoadGroupScales(scale + u * scale_step);
  }
  if constexpr (kSquare) {
    int32_t largest = 0;
    HQ_UNROLL
    for (int u = 0; u < kFoldUnroll; ++u) largest = MaxInt(largest, scales[u].largest);
    const uint32_t of_warp = ReduceMax(static_cast<uint32_t>(largest));
    if (Lane() == 0) SharedStore(4 * WarpIndex(), of_warp);
    SyncBlock();
    const uint32_t other = SharedLoad<uint32_t>(4 * (Lane() % kFoldWarps));
    largest = static_cast<int32_t>(ReduceMax(other));
    HQ_UNROLL
    for (int u = 0; u < kFoldUnroll; ++u) scales[u].largest = largest;
  }
  uint32_t changed = 0;
  HQ_UNROLL
  for (int u = 0; u < kFoldUnroll; ++u) {
    if (u >= count) continue;
    const int32_t byte = static_cast<int32_t>(scales[u].bytes >> (8 * (chunk / 2)) & 0xffu);
    changed += FoldVector<E>(loaded[u], byte, scales[u].largest, source + u * source_step,
                             codes + u * codes_step);
    if (kSquare ? ThreadIndex() == 0 && u == 0 : chunk == 0) {
      Store(out_scale + u * a.out_stride_k, FoldedScale(scales[u].largest, FoldLift<E>::kLift));
    }
  }
  PutChanged(changed, a.changed);
}

// ---- any shape, any blocks

// Largest scale byte among columns [k0, k1) of one row, over the warp.
HQ_DEVICE int32_t RowLargest(const FoldArgs& a, int64_t row, int64_t k0, int64_t k1) {
  const uint8_t* scales = a.scale + (row >> a.row_shift) * a.scale_stride;
  const int64_t k = k0 + static_cast<int64_t>(Lane()) * 4;
  const int32_t byte = k < k1 ? static_cast<int32_t>(Load(scales + (k >> a.col_shift))) : 0;
  return static_cast<int32_t>(ReduceMax(static_cast<uint32_t>(WithoutNan(byte))));
}

// A warp per row of a group, a block of threads per `height` rows, or per eight rows of one each.
template <class E>
HQ_GLOBAL void HQ_LAUNCH_BOUNDS(kFoldThreads, 2) FoldGroups(FoldArgs a) {
  const int64_t step = static_cast<int64_t>(BlockIndex());
  const int64_t down = step / a.groups, group = step - down * a.groups;
  const int64_t k0 = group * kFoldWidth;
  const int64_t k1 = k0 + kFoldWidth < a.k ? k0 + kFoldWidth : a.k;
  const bool is_square = a.height != 1;
  const int64_t row0 = down * (is_square ? a.height : kFoldWarps);
  const int64_t last = row0 + (is_square ? a.height : kFoldWarps);
  const int64_t row1 = last < a.rows ? last : a.rows;
  int32_t shared_largest = 0;
  if (is_square) {
    for (int64_t row = row0 + WarpIndex(); row < row1; row += kFoldWarps) {
      shared_largest = MaxInt(shared_largest, RowLargest(a, row, k0, k1));
    }
    if (Lane() == 0) SharedStore(4 * WarpIndex(), static_cast<uint32_t>(shared_largest));
    SyncBlock();
    const uint32_t other = SharedLoad<uint32_t>(4 * (Lane() % kFoldWarps));
    shared_largest = static_cast<int32_t>(ReduceMax(other));
  }
  uint32_t changed = 0;
  for (int64_t row = row0 + WarpIndex(); row < row1; row += kFoldWarps) {
    const int32_t largest = is_square ? shared_largest : RowLargest(a, row, k0, k1);
    for (int i = 0; i < 4; ++i) {
      const int64_t k = k0 + 32 * i + Lane();
      if (k >= k1) continue;
      const int64_t scale_at = (row >> a.row_shift) * a.scale_stride + (k >> a.col_shift);
      const int32_t byte = static_cast<int32_t>(Load(a.scale + scale_at));
      const uint8_t* p = a.data + row * a.data_stride;
      const uint32_t code = E::kBits == 4 ? Load(p + k / 2) >> (4 * (k % 2)) & 0xfu : Load(p + k);
      const FoldedCode<E> folded = FoldOne<E>(code, byte, largest);
      Store(a.codes + row * a.k + k, static_cast<uint8_t>(folded.code));
      changed += folded.is_changed;
    }
    if (Lane() == 0 && (!is_square || row == row0)) {
      const int64_t to = (is_square ? down : row) * a.out_stride_row + group * a.out_stride_k;
      Store(a.out_scale + to, FoldedScale(largest, FoldLift<E>::kLift));
    }
  }
  PutChanged(changed, a.changed);
}

}  // namespace cuda

HQ_NAMESPACE_END

#endif  // HYBRIDQ_CUDA_FOLD_H_
