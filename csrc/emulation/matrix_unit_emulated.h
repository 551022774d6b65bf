// cuda/matrix_unit.h for the host. Included by cuda/matrix_unit.h only.
//
// Tiles lie in rows of 128 bytes without the exchange of parts, which only copies and matrix units
// see. Products are made at once: that a kernel waits for them is not checked.
#ifndef HYBRIDQ_EMULATION_MATRIX_UNIT_EMULATED_H_
#define HYBRIDQ_EMULATION_MATRIX_UNIT_EMULATED_H_

#include <array>
#include <cstring>

#include "cuda/matrix_unit.h"

#define HQ_GRID_CONSTANT const

HQ_NAMESPACE_BEGIN

struct TileMap {
  const uint8_t* data;
  int64_t rows, cols;
  int32_t item, box_rows;  // bytes of an element; columns of a box are 128
};

inline uint32_t FirstTile() { return 0; }

inline void BarrierInit(uint32_t at, uint32_t arrivals, Site where = Site::current()) {
  emulation::InitBarrier(at, arrivals, where);
}
inline void BarrierFence() {}
inline void BarrierArrive(uint32_t at, Site where = Site::current()) {
  emulation::Arrive(at, 0, where);
}
inline void BarrierExpect(uint32_t at, uint32_t nbytes, Site where = Site::current()) {
  emulation::Arrive(at, nbytes, where);
}
inline void BarrierWait(uint32_t at, uint32_t parity, Site where = Site::current()) {
  emulation::Meet(emulation::Op::kAwait, at, static_cast<int32_t>(parity), where);
}
inline void CopyTile(uint32_t to, const TileMap& map, int32_t row, int32_t col, uint32_t barrier,
                     Site where = Site::current()) {
  emulation::CopyBox({map.data, map.rows, map.cols * map.item, row, int64_t{col} * map.item,
                      map.box_rows, 128 * map.item},
                     to, barrier, where);
}
template <class T>
inline T LoadCopied(uint32_t offset, Site where = Site::current()) {
  T v;
  std::memcpy(&v, emulation::CheckCopied(offset, sizeof(T), where), sizeof(T));
  return v;
}

template <int kCount>
inline void KeepRegisters() {}
template <int kCount>
inline void TakeRegisters() {}
inline void UnitFence() {}
inline void UnitCommit() {}
template <int kLeft>
inline void UnitWait() {}

template <class E>
inline const std::array<float, 256>& ValuesOf() {
  static const auto values = [] {
    std::array<float, 256> made{};
    for (uint32_t code = 0; code < 256; ++code) made[code] = Decode<E>(code);
    return made;
  }();
  return values;
}

// A thread's own results. The 32 products of each are added exactly, and rounded to FP32 once.
template <class A, class B>
inline void UnitMultiply(float (&sums)[kUnitResults], uint32_t a, uint32_t b, int adds,
                         Site where = Site::current()) {
  const auto &left = ValuesOf<A>(), &right = ValuesOf<B>();
  const uint32_t row = WarpIndex() % 4 * 16 + Lane() / 4, col = Lane() % 4 * 2;
  const uint8_t* rows =
      emulation::CheckCopied(a, (kUnitRows - 1) * kTileRowBytes + kUnitDepth, where);
  const uint8_t* cols =
      emulation::CheckCopied(b, (kUnitCols - 1) * kTileRowBytes + kUnitDepth, where);
  for (uint32_t i = 0; i < kUnitResults; ++i) {
    const uint8_t* x = rows + (row + (i / 2 % 2) * 8) * kTileRowBytes;
    const uint8_t* y = cols + (col + i / 4 * 8 + i % 2) * kTileRowBytes;
    double sum = adds != 0 ? sums[i] : 0.0;
    for (uint32_t k = 0; k < kUnitDepth; ++k) sum += static_cast<double>(left[x[k]]) * right[y[k]];
    sums[i] = static_cast<float>(sum);
  }
}

HQ_NAMESPACE_END

#endif  // HYBRIDQ_EMULATION_MATRIX_UNIT_EMULATED_H_
