// Scales of the blocks of a tile, and how lanes that share a block share the work on it.
#ifndef HYBRIDQ_CUDA_ENCODE_SCALES_H_
#define HYBRIDQ_CUDA_ENCODE_SCALES_H_

#include "cuda/encode_kinds.h"

HQ_NAMESPACE_BEGIN

namespace cuda {

// What a plane's scales need of the whole tensor, or of the tile's group.
template <class K>
struct TensorRule {
  TwoLevelRule two_level{};
  float multiplier = 1.0f;

  template <class G>
  HQ_DEVICE TensorRule(const PlaneArgs& p, const Place<G>& at) {
    if constexpr (K::kByRow) {
      // Of each line: At.
    } else if constexpr (K::kRule == Rule::kTwoLevel) {
      two_level = MakeTwoLevelRule(at.Statistic(p.stat), p.tensor_bound);
    } else if constexpr (K::kExists && !K::kIsAmax && K::kBlock == 0) {
      const AmaxScale s = ComputeTensorScale(at.Statistic(p.stat), p.amax_rule);
      multiplier = s.multiplier;
      if (at.is_first) Store(reinterpret_cast<float*>(p.scale) + at.group, s.decode);
    }
  }

  // Scale of a line of the plane, from the line's amax; of those behind the last the last one's.
  HQ_DEVICE AmaxScale OfLine(const PlaneArgs& p, uint64_t line) const {
    static_assert(K::kByRow && K::kRule == Rule::kAmax);
    const uint64_t last = static_cast<uint64_t>(p.rows) - 1;
    return ComputeTensorScale(Load(p.stat + (line < last ? line : last)), p.amax_rule);
  }

  // Of a line of the plane. Those behind the last are read like it: nothing is stored of them.
  HQ_DEVICE TwoLevelRule At(const PlaneArgs& p, uint64_t line) const {
    if constexpr (!K::kByRow && (!K::kFourOverSix || K::kSquare)) {
      return two_level;
    } else {
      if (!K::kByRow && !p.row_scaled) return two_level;
      const uint64_t last = static_cast<uint64_t>(p.rows) - 1;
      return MakeTwoLevelRule(Load(p.stat + (line < last ? line : last)), p.tensor_bound);
    }
  }
};

struct Scaled {
  float multiplier;
  uint32_t stored;  // a byte, or the bits of an FP32
};

// Value of an E4M3 scale, which has no sign: its bits, moved to where FP32 has exponent and
// mantissa, make the value times 2^-120, subnormal codes included.
HQ_DEVICE float ScaleValue(uint32_t code) {
  const float value = MulRn(FromBits(code << 20), 0x1p120f);
  return code >= E4M3::kFirstNanCode ? FromSignedBits(kQuietNanBits) : value;
}

// What is multiplied with the elements of a block whose E4M3 scale is `code`.
HQ_DEVICE float MultiplierOf(uint32_t code, const TwoLevelRule& rule) {
  return MinKeepNan(RcpRn(MulRn(ScaleValue(code), rule.inverse_global)), FloatMax());
}

// Scales of kCount blocks, an even number: two casts are one instruction. They lie in lines of the
// plane below each other, the first in `line`.
template <class K, int kCount>
HQ_DEVICE void ScalesOf(const int32_t (&magnitude)[kCount], const PlaneArgs& p,
                        const TensorRule<K>& rule, uint64_t line, Scaled (&out)[kCount]) {
  static_assert(kCount % 2 == 0 && !K::kFourOverSix);
  HQ_UNROLL
  for (int i = 0; i < kCount; i += 2) {
    if constexpr (K::kRule == Rule::kTwoLevel) {
      // As ComputeTwoLevelScale. The cast saturates: an infinite product needs no bound before it.
      const TwoLevelRule one = rule.At(p, line + i), next = rule.At(p, line + i + 1);
      const uint32_t codes =
          CastPair<E4M3>(MulRn(FromSignedBits(magnitude[i]), one.block_factor),
                         MulRn(FromSignedBits(magnitude[i + 1]), next.block_factor));
      out[i] = {MultiplierOf(codes & 0xffu, one), codes & 0xffu};
      out[i + 1] = {MultiplierOf(codes >> 8, next), codes >> 8};
    } else {
      HQ_UNROLL
      for (int j = i; j < i + 2; ++j) {
        if constexpr (K::kRule == Rule::kAmax) {
          const AmaxScale s = ComputeAmaxScale(magnitude[j], p.amax_rule);
          out[j] = {s.multiplier, Bits(s.decode)};
        } else {
          const int32_t byte = RceilScale(magnitude[j], p.inverse_fmax);
          out[j] = {E8m0Multiplier(byte), static_cast<uint32_t>(byte)};
        }
      }
    }
  }
}

// From a block's scale to the next one's of its row: FP32 scales may lie as a product wants.
template <class K>
HQ_DEVICE uint64_t ScaleStep(const PlaneArgs& p) {
  return K::kScaleBytes == 4 ? static_cast<uint64_t>(p.scale_step) : 1;
}

// Whether the scales go to tiles of 128 x 4 (swizzle.h). Only whole tiles are written so.
template <class K>
HQ_DEVICE bool IsTiled(const PlaneArgs& p) {
  return kWritesTiles && K::kScaleBytes == 1 && p.is_tiled;
}

// `scale_stride`: of a row of tiles.
HQ_DEVICE uint64_t TiledAt(const PlaneArgs& p, uint64_t row, uint64_t block) {
  return row / 128 * p.scale_stride + block / 4 * 512 + row % 32 * 16 + row % 128 / 32 * 4 +
         block % 4;
}

template <class K>
HQ_DEVICE void StoreScale(const PlaneArgs& p, uint64_t at, const Scaled& s) {
  if constexpr (K::kScaleBytes == 4) {
    Store(reinterpret_cast<float*>(p.scale) + at, FromBits(s.stored));
  } else {
    Store(p.scale + at, static_cast<uint8_t>(s.stored));
  }
}

// The scales of a warp's squares to tiles: there each line of the plane has its own, a square's is
// that of all its lines. A lane stores those of a line side by side, as lanes hold them. kIsColumns:
// lines are columns of x.
template <class K, class G, bool kIsColumns>
HQ_DEVICE void StoreTiledSquares(const PlaneArgs& p, const Place<G>& at, uint32_t stored) {
  constexpr uint32_t kBlock = K::kBlock;
  constexpr int kLines = kIsColumns ? kWarpCols : kWarpRows;
  constexpr uint32_t kBlocks = (kIsColumns ? kWarpRows : kWarpCols) / kBlock;
  static_assert(kBlocks == 1 || kBlocks == 2 || kBlocks == 4);
  const uint64_t row = at.r0 + at.warp_row * kWarpRows, col = at.c0 + at.warp_col * kWarpCols;
  const uint64_t line = kIsColumns ? col : row, block = (kIsColumns ? row : col) / kBlock;
  HQ_UNROLL
  for (int n = 0; n < kLines; n += 32) {
    const uint32_t own = static_cast<uint32_t>(n) + at.lane;
    const uint32_t begin = own / kBlock * kBlock;  // of the line's squares
    uint32_t word = 0;
    HQ_UNROLL
    for (uint32_t b = 0; b < kBlocks; ++b) {
      const uint32_t down = kIsColumns ? b * kBlock : begin, across = kIsColumns ? begin : b * kBlock;
      const uint32_t from = down / G::kRows * G::kLanesAcross + across / G::kCols;
      word |= ShuffleIndex(stored, static_cast<int>(from)) << (8 * b);
    }
    uint8_t* to = p.scale + TiledAt(p, line + own, block);
    if constexpr (kBlocks == 4) {
      Store(reinterpret_cast<uint32_t*>(to), word);
    } else if constexpr (kBlocks == 2) {
      Store(reinterpret_cast<uint16_t*>(to), static_cast<uint16_t>(word));
    } else {
      Store(to, static_cast<uint8_t>(word));
    }
  }
}

// The largest magnitude of the square that a thread's elements lie in.
template <class K, class G, class V>
HQ_DEVICE int32_t SquareMax(const V& v, const Place<G>& at, uint32_t exchange_at) {
  constexpr int kDown = (K::kBlock < kWarpRows ? K::kBlock : kWarpRows) / G::kRows;
  constexpr int kAcross = (K::kBlock < kWarpCols ? K::kBlock : kWarpCols) / G::kCols;
  int32_t m = v.MaxOfAll();
  HQ_UNROLL
  for (int step = 1; step < kAcross; step *= 2) m = MaxInt(m, ShuffleXor(m, step));
  HQ_UNROLL
  for (int step = 1; step < kDown; step *= 2) {
    m = MaxInt(m, ShuffleXor(m, step * G::kLanesAcross));
  }
  if constexpr (K::kBlock == 128) {
    if (at.lane == 0) SharedStore(exchange_at + 4 * WarpIndex(), static_cast<uint32_t>(m));
    SyncBlock();
    m = 0;
    HQ_UNROLL
    for (uint32_t w = 0; w < G::kWarps; ++w) {
      m = MaxInt(m, static_cast<int32_t>(SharedLoad<uint32_t>(exchange_at + 4 * w)));
    }
  }
  return m;
}

// Scale of the square that a thread's elements lie in.
template <class K, class G, class V>
HQ_DEVICE Scaled SquareScale(const V& v, const Place<G>& at, const PlaneArgs& p,
                             const TensorRule<K>& rule, uint32_t exchange_at) {
  const int32_t m = SquareMax<K>(v, at, exchange_at);
  const int32_t both[2] = {m, m};
  Scaled s[2];
  ScalesOf<K, 2>(both, p, rule, 0, s);
  return s[0];
}

// Lanes beside (kStep 1) or below each other (kStep kLanesAcross) whose elements make up one block:
// they share the work on the blocks of their rows (or columns). Each of kOwners lanes finds the
// amaxes of kLines / kOwners lines, makes their scales, and hands out the multipliers.
template <int kLines, int kLanes, int kStep, int kPerMax>
struct Sharing {
  static constexpr int kOwners = kLanes < kLines / 2 ? kLanes : kLines / 2;
  static constexpr int kOwn = kLines / kOwners;

  uint32_t self;  // of the kLanes lanes

  HQ_DEVICE explicit Sharing(uint32_t lane) : self(lane / kStep % kLanes) {}

  // The first of the lines that this lane owns: the first split is by the lowest bit.
  HQ_DEVICE uint32_t FirstLine() const {
    uint32_t first = 0;
    HQ_UNROLL
    for (int owners = 1, size = kLines; owners < kOwners; owners *= 2) {
      size /= 2;
      first += (self & static_cast<uint32_t>(owners)) != 0 ? static_cast<uint32_t>(size) : 0u;
    }
    return first;
  }
  HQ_DEVICE bool IsFirstOwner() const { return self < kOwners; }

  // From the amaxes of a thread's own elements to those of the blocks that it owns.
  template <class V>
  HQ_DEVICE void Reduce(typename V::Max (&m)[kLines / kPerMax], int32_t (&out)[kOwn]) const {
    HQ_UNROLL
    for (int owners = 1, size = kLines / kPerMax; owners < kLanes; owners *= 2) {
      if (owners < kOwners) {
        size /= 2;
        const bool takes_upper = (self & static_cast<uint32_t>(owners)) != 0;
        HQ_UNROLL
        for (int i = 0; i < kLines / kPerMax / 2; ++i) {
          if (i >= size) continue;
          const auto given = takes_upper ? m[i] : m[i + size];
          const auto kept = takes_upper ? m[i + size] : m[i];
          m[i] = V::Larger(kept, ShuffleXor(given, owners * kStep));
        }
      } else {
        HQ_UNROLL
        for (int i = 0; i < kOwn / kPerMax; ++i) {
          m[i] = V::Larger(m[i], ShuffleXor(m[i], owners * kStep));
        }
      }
    }
    HQ_UNROLL
    for (int i = 0; i < kOwn; ++i) out[i] = V::Unpack(m[i / kPerMax], i);
  }

  // Multipliers of all lines of a thread.
  HQ_DEVICE void HandOut(uint32_t lane, const Scaled (&own)[kOwn], float (&out)[kLines]) const {
    HQ_UNROLL
    for (int line = 0; line < kLines; ++line) {
      int owner = 0;
      HQ_UNROLL
      for (int owners = 1, size = kLines; owners < kOwners; owners *= 2) {
        size /= 2;
        owner += line / size % 2 != 0 ? owners : 0;
      }
      if constexpr (kOwners == 1) {
        out[line] = own[line % kOwn].multiplier;
      } else {
        const uint32_t from = (lane & ~static_cast<uint32_t>((kOwners - 1) * kStep)) |
                              static_cast<uint32_t>(owner * kStep);
        out[line] = ShuffleIndex(own[line % kOwn].multiplier, static_cast<int>(from));
      }
    }
  }
};

// Amax of the tile into the tensor's or its group's, which holds zero before: canonical, and so any
// order does.
template <class G>
HQ_DEVICE void PutTileMax(int32_t magnitude, uint8_t* out, const Place<G>& at,
                          uint32_t exchange_at) {
  if (at.is_alone) return;
  const uint32_t of_warp = ReduceMax(static_cast<uint32_t>(magnitude));
  if (Lane() == 0) SharedStore(exchange_at + 4 * WarpIndex(), of_warp);
  SyncBlock();
  if (ThreadIndex() != 0) return;
  uint32_t m = 0;
  HQ_UNROLL
  for (uint32_t w = 0; w < G::kWarps; ++w) {
    const uint32_t other = SharedLoad<uint32_t>(exchange_at + 4 * w);
    m = m > other ? m : other;
  }
  if (m != 0) {
    AtomicMax(reinterpret_cast<uint32_t*>(out) + at.group,
              Bits(CanonicalAmax(static_cast<int32_t>(m))));
  }
}

}  // namespace cuda

HQ_NAMESPACE_END

#endif  // HYBRIDQ_CUDA_ENCODE_SCALES_H_
