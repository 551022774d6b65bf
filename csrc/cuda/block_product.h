// Products of FP8 codes with FP32 scales of 1x128, of groups of tokens or of two matrices, by
// Hopper's matrix units.
//
//   out[r, c] = sum over blocks q of 128: (sum of codes a[r, k] * b[c, k]) * sa[r, q] * sb[c, q]
//
// A matrix unit adds with about 13 fraction bits, so that each 128 products have sums of their own,
// which FP32 arithmetic scales and adds. A block of threads per multiprocessor walks over a list of
// tiles of 128 x 128 that follows from the group ends on the device: one warp copies tiles of codes
// and their scales into a ring of shared memory, and two warpgroups of 64 rows each multiply the
// next step while they scale the last one (two sets of sums beside the result's: 192 registers).
// Instead of a scale for each row of b there may be one for 128 rows, or one for a group.
//
// Issue slots of a scheduler and step: 256 for the scaling of two warps, 128 where b has one scale,
// of 512 clocks that the matrix units need.
//
// Source: DeepSeek-V3 technical report, section 3.3.2 (arXiv:2412.19437), for sums of 128.
#ifndef HYBRIDQ_CUDA_BLOCK_PRODUCT_H_
#define HYBRIDQ_CUDA_BLOCK_PRODUCT_H_

#include "cuda/finish.h"
#include "cuda/matrix_unit.h"

HQ_NAMESPACE_BEGIN

namespace cuda {

inline constexpr uint32_t kProductThreads = 3 * 128;  // copies; two warpgroups that multiply
inline constexpr int32_t kProductTile = 128;          // rows of a, rows of b, and codes of a step
inline constexpr uint32_t kProductStages = 6;
// Rows of tiles that are walked through together: neighbours in time share operands.
inline constexpr int32_t kProductBand = 16;

// Where a stage and the barriers lie in shared memory, from the first tile on.
inline constexpr uint32_t kCodesBytes = kProductTile * kTileRowBytes;
inline constexpr uint32_t kScalesBytes = kProductTile * 4;
inline constexpr uint32_t kStageOfB = kProductStages * kCodesBytes;
inline constexpr uint32_t kStageOfScales = 2 * kStageOfB;
inline constexpr uint32_t kFullBarriers = kStageOfScales + kProductStages * 2 * kScalesBytes;
inline constexpr uint32_t kEmptyBarriers = kFullBarriers + 8 * kProductStages;
inline constexpr uint32_t kProductShared = kTileAlignment + kEmptyBarriers + 8 * kProductStages;

struct BlockProductArgs {
  TileMap a, b;              // codes [rows, k], tiles of 128 x 128
  TileMap a_scale, b_scale;  // FP32 [blocks of k, rows], 1 x 128
  // Instead of b_scale, of 128 rows of b and 128 codes; beside that, instead of a_scale, of groups.
  const float* right;
  int64_t right_group, right_row, right_block;  // strides
  const float* left;
  int64_t left_group;
  // Ends of the groups in tokens; null: one group. Where k is ragged, starts of them there.
  const int32_t* ends;
  const int32_t* starts;
  int32_t groups, tokens, a_rows, b_rows, b_pitch, k;
  bool is_ragged_k, is_vector;
  const void* bias;  // null: none
  DType bias_dtype;
  int64_t bias_group;
  const void* into;  // of the result's type, may be `out`; null: none
  int64_t into_row, into_col, into_group;
  void* out;
  DType dtype;
  int64_t out_row, out_group;
};

// A tile of the result, and what is summed up for it.
struct ProductTile {
  int32_t group;            // of the matrix of b, of the bias
  int32_t row, begin, end;  // first row; rows from `begin` up to `end` are its group's
  int32_t col, b_row;       // first column; where that is in b
  int32_t k, steps;         // first code; no steps: zeros

  HQ_DEVICE bool Has(int32_t at) const { return at >= begin && at < end; }
};

// Tiles in an order that all threads know, found one after the other.
class ProductTiles {
 public:
  HQ_DEVICE explicit ProductTiles(const BlockProductArgs& args)
      : p_(args), right_((args.b_rows + kProductTile - 1) / kProductTile) {
    EnterGroup();
  }

  // Whether there is a tile `index`, which is not before the last one that was asked for.
  HQ_DEVICE bool Find(int32_t index, ProductTile* t) {
    while (index - first_ >= count_) {
      if (group_ >= p_.groups) return false;
      first_ += count_;
      ++group_;
      EnterGroup();
    }
    const int32_t inside = index - first_, in_band = kProductBand * right_;
    const int32_t band = inside / in_band, at = inside % in_band;
    const int32_t left = down_ - band * kProductBand;
    const int32_t high = left < kProductBand ? left : kProductBand;
    const int32_t down = band * kProductBand + at % high, across = at / high;
    t->group = group_ < p_.groups ? group_ : p_.groups - 1;
    t->col = across * kProductTile;
    if (p_.is_ragged_k) {
      t->row = down * kProductTile;
      t->begin = 0;
      t->end = p_.a_rows;
      t->b_row = t->col;
      t->k = Bounded(Load(p_.starts + group_), p_.k) / kProductTile * kProductTile;
      const int32_t there = p_.k - t->k, own = end_ - begin_;
      t->steps = Steps(own < there ? own : there);
    } else {
      t->row = begin_ / 4 * 4 + down * kProductTile;  // scales are copied from 16 bytes on
      t->begin = begin_;
      t->end = end_;
      t->b_row = t->group * p_.b_pitch + t->col;
      t->k = 0;
      t->steps = group_ < p_.groups ? Steps(p_.k) : 0;
    }
    return true;
  }

 private:
  HQ_DEVICE static int32_t Steps(int32_t k) { return (k + kProductTile - 1) / kProductTile; }
  HQ_DEVICE static int32_t Bounded(int32_t v, int32_t limit) {
    return v < 0 ? 0 : v < limit ? v : limit;
  }
  // Wrong ends cannot lead out of the tokens. Behind the last group are rows of none.
  HQ_DEVICE int32_t EndOf(int32_t group) const {
    if (p_.ends == nullptr || group >= p_.groups) return p_.tokens;
    return Bounded(Load(p_.ends + group), p_.tokens);
  }
  HQ_DEVICE void EnterGroup() {
    begin_ = group_ == 0 ? 0 : EndOf(group_ - 1);
    const int32_t end = EndOf(group_);
    end_ = end < begin_ ? begin_ : end;
    if (p_.is_ragged_k) {
      down_ = group_ < p_.groups ? Steps(p_.a_rows) : 0;
    } else {
      down_ = end_ > begin_ ? Steps(end_ - begin_ / 4 * 4) : 0;
    }
    count_ = down_ * right_;
  }

  const BlockProductArgs& p_;
  int32_t right_, group_ = 0, first_ = 0;
  int32_t begin_ = 0, end_ = 0, down_ = 0, count_ = 0;
};

#if defined(HQ_EMULATE) || HQ_HAS_MATRIX_UNIT

// A place in the ring of stages.
struct ProductStage {
  uint32_t at = 0, parity = 0;
  HQ_DEVICE void Next() {
    if (++at < kProductStages) return;
    at = 0;
    parity ^= 1;
  }
};

// One warp copies what the others multiply. All of its lanes wait, the first one copies.
template <bool kOneRight>
HQ_DEVICE void CopySteps(const BlockProductArgs& p, uint32_t base) {
  ProductTiles tiles(p);
  ProductTile t;
  ProductStage stage;
  const auto step = static_cast<int32_t>(GridSize());
  for (auto i = static_cast<int32_t>(BlockIndex()); tiles.Find(i, &t); i += step) {
    for (int32_t s = 0; s < t.steps; ++s, stage.Next()) {
      BarrierWait(base + kEmptyBarriers + 8 * stage.at, stage.parity ^ 1);
      if (Lane() != 0) continue;
      const uint32_t full = base + kFullBarriers + 8 * stage.at;
      const uint32_t codes = base + stage.at * kCodesBytes;
      const uint32_t scales = base + kStageOfScales + stage.at * 2 * kScalesBytes;
      const int32_t k = t.k + s * kProductTile, block = k / kProductTile;
      const uint32_t scaled = kOneRight ? (p.left == nullptr ? 1 : 0) : 2;
      BarrierExpect(full, 2 * kCodesBytes + scaled * kScalesBytes);
      CopyTile(codes, p.a, t.row, k, full);
      CopyTile(codes + kStageOfB, p.b, t.b_row, k, full);
      if (scaled != 0) CopyTile(scales, p.a_scale, block, t.row, full);
      if (!kOneRight) CopyTile(scales + kScalesBytes, p.b_scale, block, t.b_row, full);
    }
  }
}

// What lane and warp of a warpgroup have of a tile.
struct ProductPlace {
  uint32_t row, quad;  // first of its two rows, 8 apart; its two columns of every eight are 2 quad
};

// The scales of a step that are not in shared memory.
struct OneScales {
  bool has_left;
  float left, right;
};

// Sums of a step, times their scales, added to `sum`.
template <bool kOneRight>
HQ_DEVICE void AddScaled(const float (&part)[kUnitResults], uint32_t scales, ProductPlace place,
                         OneScales one, float (&sum)[kUnitResults]) {
  float low = one.left, high = one.left;
  if (!kOneRight || !one.has_left) {
    low = LoadCopied<float>(scales + 4 * place.row);
    high = LoadCopied<float>(scales + 4 * (place.row + 8));
  }
  if constexpr (kOneRight) {
    low = MulRn(low, one.right);
    high = MulRn(high, one.right);
    HQ_UNROLL
    for (uint32_t i = 0; i < kUnitResults; ++i) {
      sum[i] = FmaRn(part[i], (i & 2) == 0 ? low : high, sum[i]);
    }
  } else {
    HQ_UNROLL
    for (uint32_t j = 0; j < kUnitResults / 4; ++j) {
      const uint32_t at = scales + kScalesBytes + 4 * (8 * j + 2 * place.quad);
      const Vec2 right = LoadCopied<Vec2>(at);
      const float first = FromBits(right.x), second = FromBits(right.y);
      sum[4 * j] = FmaRn(MulRn(part[4 * j], low), first, sum[4 * j]);
      sum[4 * j + 1] = FmaRn(MulRn(part[4 * j + 1], low), second, sum[4 * j + 1]);
      sum[4 * j + 2] = FmaRn(MulRn(part[4 * j + 2], high), first, sum[4 * j + 2]);
      sum[4 * j + 3] = FmaRn(MulRn(part[4 * j + 3], high), second, sum[4 * j + 3]);
    }
  }
}

// Adds the bias and what is added to a thread's results.
template <DType kTarget>
HQ_DEVICE void Finish(const BlockProductArgs& p, const ProductTile& t, ProductPlace place,
                      float (&sum)[kUnitResults]) {
  const bool has_bias = p.bias != nullptr && t.steps > 0;
  const int64_t bias = t.group * p.bias_group, into = t.group * p.into_group;
  HQ_UNROLL
  for (uint32_t i = 0; i < kUnitResults / 2; ++i) {
    const auto col = t.col + static_cast<int32_t>(i / 2 * 8 + 2 * place.quad + i % 2);
    float &upper = sum[i / 2 * 4 + i % 2], &lower = sum[i / 2 * 4 + 2 + i % 2];
    if (col >= p.b_rows) continue;
    if (has_bias) {
      const float v = ReadOne(p.bias, bias + col, p.bias_dtype);
      upper = AddRn(upper, v);
      lower = AddRn(lower, v);
    }
    if (p.into == nullptr) continue;
    const auto row = t.row + static_cast<int32_t>(place.row);
    const int64_t at = into + row * p.into_row + col * p.into_col;
    if (t.Has(row)) upper = AddRn(upper, ReadOne(p.into, at, kTarget));
    if (t.Has(row + 8)) lower = AddRn(lower, ReadOne(p.into, at + 8 * p.into_row, kTarget));
  }
}

// Four results of a row side by side: two lanes exchange pairs, so that four write 32 bytes.
template <DType kTarget>
HQ_DEVICE void StoreFours(const BlockProductArgs& p, const ProductTile& t, ProductPlace place,
                          const float (&sum)[kUnitResults]) {
  static_assert(kTarget != DType::kFloat32);
  const uint32_t is_odd = place.quad & 1;
  HQ_UNROLL
  for (uint32_t i = 0; i < kUnitResults / 4; ++i) {  // of eights j and j + 1 one of two rows
    const uint32_t j = i / 2 * 2, half = i % 2;
    const uint32_t first = PackPair<kTarget>(sum[4 * j + 2 * half], sum[4 * j + 2 * half + 1]);
    const uint32_t second = PackPair<kTarget>(sum[4 * j + 4 + 2 * half], sum[4 * j + 5 + 2 * half]);
    const uint32_t got = ShuffleXor(is_odd != 0 ? first : second, 1);
    const auto row = t.row + static_cast<int32_t>(place.row + 8 * half);
    const auto col = t.col + static_cast<int32_t>(8 * (j + is_odd) + place.quad / 2 * 4);
    if (!t.Has(row) || col >= p.b_rows) continue;
    uint16_t* out = static_cast<uint16_t*>(p.out) + t.group * p.out_group;
    Store(reinterpret_cast<Vec2*>(out + row * p.out_row + col),
          is_odd != 0 ? Vec2{got, second} : Vec2{first, got});
  }
}

template <DType kTarget>
HQ_DEVICE void StoreResults(const BlockProductArgs& p, const ProductTile& t, ProductPlace place,
                            const float (&sum)[kUnitResults]) {
  using Out = typename Item<kTarget>::Type;
  Out* out = static_cast<Out*>(p.out) + t.group * p.out_group;
  HQ_UNROLL
  for (uint32_t i = 0; i < kUnitResults / 2; ++i) {  // of an eight one of two rows
    const auto row = t.row + static_cast<int32_t>(place.row + i % 2 * 8);
    const auto col = t.col + static_cast<int32_t>(i / 2 * 8 + 2 * place.quad);
    if (!t.Has(row) || col >= p.b_rows) continue;
    Out* at = out + row * p.out_row + col;
    const float first = sum[2 * i], second = sum[2 * i + 1];
    if (kTarget == DType::kFloat32 && p.is_vector) {
      Store(reinterpret_cast<Vec2*>(at), Vec2{Bits(first), Bits(second)});
      continue;
    }
    Store(at, Item<kTarget>::Make(first));
    if (col + 1 < p.b_rows) Store(at + 1, Item<kTarget>::Make(second));
  }
}

template <DType kTarget>
HQ_DEVICE void WriteResults(const BlockProductArgs& p, const ProductTile& t, ProductPlace place,
                            float (&sum)[kUnitResults]) {
  if (p.bias != nullptr || p.into != nullptr) Finish<kTarget>(p, t, place, sum);
  if constexpr (kTarget != DType::kFloat32) {
    if (p.is_vector) return StoreFours<kTarget>(p, t, place, sum);
  }
  StoreResults<kTarget>(p, t, place, sum);
}

template <class A, class B, bool kOneRight>
HQ_DEVICE void MultiplySteps(const BlockProductArgs& p, uint32_t base) {
  const uint32_t group = WarpIndex() / 4 - 1;
  const ProductPlace place{group * kUnitRows + WarpIndex() % 4 * 16 + Lane() / 4, Lane() % 4};
  ProductTiles tiles(p);
  ProductTile t;
  ProductStage stage;
  float one[kUnitResults], two[kUnitResults], sum[kUnitResults];
  const auto multiply = [&](float(&part)[kUnitResults]) {
    BarrierWait(base + kFullBarriers + 8 * stage.at, stage.parity);
    const uint32_t codes = base + stage.at * kCodesBytes;
    UnitFence();
    HQ_UNROLL
    for (uint32_t i = 0; i < kProductTile / kUnitDepth; ++i) {
      UnitMultiply<A, B>(part, codes + group * kUnitRows * kTileRowBytes + i * kUnitDepth,
                         codes + kStageOfB + i * kUnitDepth, i != 0);
    }
    UnitCommit();
    const uint32_t at = stage.at;
    stage.Next();
    return at;
  };
  const auto step = static_cast<int32_t>(GridSize());
  for (auto index = static_cast<int32_t>(BlockIndex()); tiles.Find(index, &t); index += step) {
    HQ_UNROLL
    for (uint32_t i = 0; i < kUnitResults; ++i) sum[i] = 0.0f;
    const float* right = nullptr;
    OneScales next{p.left != nullptr, 1.0f, 1.0f};  // of the next step
    if (kOneRight && t.steps > 0) {
      right = p.right + t.group * p.right_group + t.col / kProductTile * p.right_row;
      next.right = LoadReadOnly(right);
      if (next.has_left) next.left = LoadReadOnly(p.left + t.group * p.left_group);
    }
    int32_t done = 0;
    const auto add = [&](const float(&part)[kUnitResults], uint32_t at) {
      const OneScales now = next;
      if (kOneRight && ++done < t.steps) next.right = LoadReadOnly(right + done * p.right_block);
      AddScaled<kOneRight>(part, base + kStageOfScales + at * 2 * kScalesBytes, place, now, sum);
      SyncWarp();
      if (Lane() == 0) BarrierArrive(base + kEmptyBarriers + 8 * at);
    };
    if (t.steps > 0) {
      uint32_t last = multiply(one);
      int32_t s = 1;
      for (; s + 1 < t.steps; s += 2) {
        const uint32_t second = multiply(two);
        UnitWait<1>();
        add(one, last);
        last = multiply(one);
        UnitWait<1>();
        add(two, second);
      }
      if (s < t.steps) {
        const uint32_t second = multiply(two);
        UnitWait<1>();
        add(one, last);
        UnitWait<0>();
        add(two, second);
      } else {
        UnitWait<0>();
        add(one, last);
      }
    }
    if (p.dtype == DType::kBFloat16) {
      WriteResults<DType::kBFloat16>(p, t, place, sum);
    } else if (p.dtype == DType::kFloat16) {
      WriteResults<DType::kFloat16>(p, t, place, sum);
    } else {
      WriteResults<DType::kFloat32>(p, t, place, sum);
    }
  }
}

#endif

template <class A, class B, bool kOneRight>
HQ_GLOBAL void HQ_LAUNCH_BOUNDS(kProductThreads, 1)
    BlockProduct(HQ_GRID_CONSTANT BlockProductArgs p) {
#if defined(HQ_EMULATE) || HQ_HAS_MATRIX_UNIT
  const uint32_t base = FirstTile();
  if (ThreadIndex() == 0) {
    for (uint32_t i = 0; i < kProductStages; ++i) {
      BarrierInit(base + kFullBarriers + 8 * i, 1);
      BarrierInit(base + kEmptyBarriers + 8 * i, 8);  // warps that multiply
    }
    BarrierFence();
  }
  SyncBlock();
  if (WarpIndex() < 4) {
    KeepRegisters<40>();
    if (WarpIndex() == 0) CopySteps<kOneRight>(p, base);
  } else {
    TakeRegisters<232>();
    MultiplySteps<A, B, kOneRight>(p, base);
  }
#endif
}

}  // namespace cuda

HQ_NAMESPACE_END

#endif  // HYBRIDQ_CUDA_BLOCK_PRODUCT_H_
