// The general encoder (encode_general.h) behind a norm or an activation: a tile is changed between
// memory and shared memory, and rounded to x's type there, so that what follows sees what a stored
// y would have held. Any plane, shape and type that the general encoder takes; two planes are two
// launches, and each makes its values.
#ifndef HYBRIDQ_CUDA_ENCODE_GENERAL_MAPPED_H_
#define HYBRIDQ_CUDA_ENCODE_GENERAL_MAPPED_H_

#include "cuda/encode_general.h"
#include "cuda/prologue.h"

HQ_NAMESPACE_BEGIN

namespace cuda {

// `general`: x has the strides of the plane's own matrix, and y its extent. Of an amax, `scale` of
// the plane is where it goes.
struct GeneralMappedArgs {
  GeneralArgs general;
  MapArgs map;
};

// Of one plane of y. The host functions, for the dispatcher (encode_mapped.cu); `out` as those of
// Amax and RowAmax.
void EncodeGeneralOfMap(const Prologue& map, const GpuPlane& plane, bool is_columnwise,
                        Stream stream);
void AmaxGeneralOfMap(const Prologue& map, const GpuPlane& plane, bool is_columnwise, float* out,
                      Stream stream);

// Lanes lie along the rows of y, whose elements are neighbours, and a thread stays in one column:
// it reads the column's weights once.
struct MappedTile {
  const MapArgs& map;

  HQ_DEVICE void operator()(const GeneralArgs& a, const GeneralLayout& at, int64_t r0,
                            int64_t k0) const {
    if (map.form == MapForm::kNorm) {
      const int64_t column = a.is_columnwise ? r0 + Across(a) : k0 + Across(a);
      const bool is_there = column < (a.is_columnwise ? a.plane.rows : a.k);
      const float gamma = is_there ? Load(map.gamma + column) : 0.0f;
      const float beta = is_there && map.beta != nullptr ? Load(map.beta + column) : 0.0f;
      Fill(a, at, r0, k0, [&](int64_t where, int64_t row) {
        const float mean = map.mean == nullptr ? 0.0f : Load(map.mean + row);
        return Normalized(map, LoadAs(a.x, where, a.dtype), mean, Load(map.rstd + row), gamma,
                          beta);
      });
      return;
    }
    Fill(a, at, r0, k0, [&](int64_t where, int64_t) {
      const float v = LoadAs(a.x, where, a.dtype);
      const float gate = map.is_gated ? LoadAs(a.x, where + map.gate, a.dtype) : 1.0f;
      const float value =
          map.form == MapForm::kRelu ? ReluActivation(map, v) : SmoothActivation(map, v);
      return map.is_gated ? MulRn(value, gate) : value;
    });
  }

  // How many columns of y are in a tile: a divisor of kGeneralThreads, as blocks are.
  static HQ_DEVICE int Width(const GeneralArgs& a) {
    return a.is_columnwise ? a.tile_rows : kGeneralWidth;
  }
  static HQ_DEVICE int Across(const GeneralArgs& a) {
    return static_cast<int>(ThreadIndex()) % Width(a);
  }

  // value(where, row): of the element of x that lies at `where`, in y's row.
  template <class Value>
  static HQ_DEVICE void Fill(const GeneralArgs& a, const GeneralLayout& at, int64_t r0, int64_t k0,
                             const Value& value) {
    const int across = Across(a), step = kGeneralThreads / Width(a);
    const int depth = a.is_columnwise ? kGeneralWidth : a.tile_rows;
    for (int down = static_cast<int>(ThreadIndex()) / Width(a); down < depth; down += step) {
      const int r = a.is_columnwise ? across : down, k = a.is_columnwise ? down : across;
      float v = 0.0f;
      if (r0 + r < a.plane.rows && k0 + k < a.k) {
        const int64_t where = (r0 + r) * a.stride_row + (k0 + k) * a.stride_k;
        v = RoundTo(value(where, a.is_columnwise ? k0 + k : r0 + r), a.dtype);
      }
      SharedStore(at.Tile(r, k), v);
    }
  }
};

template <class E>
HQ_GLOBAL void HQ_LAUNCH_BOUNDS(kGeneralThreads, 1) EncodeGeneralMapped(GeneralMappedArgs a) {
  EncodeGeneralOf<E>(a.general, MappedTile{a.map});
}

// The amax of y, or of each row of the plane's own matrix, as the plane takes it: after the
// transform, if it has one. `scale` holds zeros before.
template <bool kPerRow>
HQ_GLOBAL void HQ_LAUNCH_BOUNDS(kGeneralThreads, 1) AmaxGeneralMapped(GeneralMappedArgs a) {
  const GeneralArgs& g = a.general;
  const int64_t tile = BlockIndex();
  const int64_t r0 = tile / g.tiles_across * g.tile_rows;
  const int64_t k0 = tile % g.tiles_across * kGeneralWidth;
  const GeneralLayout at{g.tile_rows * kChunks};
  const int first = static_cast<int>(ThreadIndex());
  MappedTile{a.map}(g, at, r0, k0);
  const int amaxes = kPerRow ? g.tile_rows : 1;
  for (int i = first; i < amaxes; i += kGeneralThreads) SharedStore(at.Array(kAmaxOf, i), 0u);
  SyncBlock();
  // A thread's transform is of the 16 elements that it then looks at.
  uint32_t largest = 0;
  for (int i = first; i < at.items; i += kGeneralThreads) {
    const Chunk item = ItemOf(g, i);
    if (g.plane.signs >= 0) TransformItem(at, item, static_cast<uint32_t>(g.plane.signs));
    int32_t m = 0;
    HQ_UNROLL
    for (int j = 0; j < kChunk; ++j) {
      m = MaxInt(m, Magnitude(SharedLoad<float>(at.Tile(item.row, item.chunk * kChunk + j))));
    }
    const auto of_item = static_cast<uint32_t>(m);
    if constexpr (kPerRow) {
      SharedAtomicMax(at.Array(kAmaxOf, item.row), of_item);
    } else {
      largest = largest > of_item ? largest : of_item;
    }
  }
  if constexpr (!kPerRow) {
    const uint32_t of_warp = ReduceMax(largest);
    if (Lane() == 0) SharedAtomicMax(at.Array(kAmaxOf, 0), of_warp);
  }
  SyncBlock();
  for (int i = first; i < amaxes; i += kGeneralThreads) {
    const uint32_t m = SharedLoad<uint32_t>(at.Array(kAmaxOf, i));
    // Rows beyond the plane's hold zeros.
    if (m == 0) continue;
    auto* out = reinterpret_cast<uint32_t*>(g.plane.scale) + (kPerRow ? r0 + i : 0);
    AtomicMax(out, Bits(CanonicalAmax(static_cast<int32_t>(m))));
  }
}

}  // namespace cuda

HQ_NAMESPACE_END

#endif  // HYBRIDQ_CUDA_ENCODE_GENERAL_MAPPED_H_
