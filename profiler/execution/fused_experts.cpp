// SwiGLU experts of one width over the rows that chose them, on a CPU: the operator `gatewise::fused_experts`.
//
// Of each expert a thread gathers its rows, multiplies them by W_gate and W_up a few columns at a time, applies
// SiLU(gate) * up to the sums while they are in the cache, and multiplies that by W_down. Products are oneDNN's small
// ones (brgemm), called through torch, with sums in float32; nothing between rows and results goes to memory.
// Where there are fewer experts with rows than keep all threads busy, the columns of each are shared out instead.
//
// Weights of an expert are panels of 64 columns, one after the other (`fused_experts.py` makes them):
//   of gate and up: 32 columns of W_gate^T beside the same 32 of W_up^T, [d, 64] each;
//   of W_down: [width, 64] each.
// The last of each may have fewer columns: numbers of columns are filled up to `kLanes`, as any product does inside.
// In bfloat16 two neighbouring rows of a panel are interleaved, as its products take them, and odd numbers of rows
// filled up with zeros.

#include <ATen/Parallel.h>
#include <ATen/core/Tensor.h>
#include <ATen/cpu/vec/vec.h>
#include <ATen/native/CPUBlas.h>
#include <torch/csrc/autograd/autograd_not_implemented_fallback.h>
#include <torch/library.h>

#include <algorithm>
#include <atomic>
#include <cstring>
#include <memory>
#include <type_traits>
#include <utility>
#include <vector>

namespace {

using at::BFloat16;
using Lanes = at::vec::Vectorized<float>;

constexpr int64_t kLanes = Lanes::size(); // numbers of a vector
constexpr int64_t kPanel = 64;           // columns of a panel, at most
constexpr int64_t kHalf = kPanel / 2;    // of which gate, and up, have this many
static_assert(kHalf == 2 * kLanes);
constexpr int64_t kBlock = 64;           // rows of a product, at most: oneDNN compiles one for each number of rows
constexpr int64_t kDepth = 2048;         // depth of a product, at most
constexpr int64_t kChunk = 256;          // rows of an expert that one thread takes at a time, at most
constexpr int64_t kCacheBytes = 1 << 18; // and at most so many bytes of them
constexpr int64_t kPerThread = 2;        // pieces of work a thread should find at least
constexpr int64_t kLargest = 1 << 24;    // width and hidden size, so that products of both can be counted

int64_t rounded(int64_t count, int64_t multiple) {
  return (count + multiple - 1) / multiple * multiple;
}

template <typename T>
constexpr bool interleaved = std::is_same_v<T, BFloat16>;

// Rows of a panel as products take them.
template <typename T>
int64_t filled(int64_t rows) {
  return interleaved<T> ? rounded(rows, 2) : rows;
}

// The first `count` numbers of two vectors.
void store(float* to, Lanes a, Lanes b, int64_t count) {
  a.store(to, std::min(count, kLanes));
  if (count > kLanes) {
    b.store(to + kLanes, count - kLanes);
  }
}

void store(BFloat16* to, Lanes a, Lanes b, int64_t count) {
  at::vec::convert_float_bfloat16(a, b).store(to, count);
}

Lanes exponential(Lanes x, const float*) {
  return x.exp();
}

// Good to more digits than bfloat16 has.
Lanes exponential(Lanes x, const BFloat16*) {
  return x.exp_u20();
}

template <typename T>
struct Layer {
  const T* x;
  const int64_t* rows;
  T* y;
  int64_t hidden, width;

  int64_t depth() const { return filled<T>(hidden); } // of the first products, and how far apart gathered rows are
  int64_t inner() const { return filled<T>(width); }  // of the last ones, and how far apart hidden rows are
  int64_t first_columns() const { return 2 * rounded(width, kLanes); }
  int64_t last_columns() const { return rounded(hidden, kLanes); }
  int64_t first_panels() const { return rounded(first_columns(), kPanel) / kPanel; }
  int64_t last_panels() const { return rounded(last_columns(), kPanel) / kPanel; }
  int64_t weights_of_expert() const { return first_columns() * depth() + last_columns() * inner(); }
  int64_t chunk() const {
    const int64_t fitting = kCacheBytes / (depth() * static_cast<int64_t>(sizeof(T))) / kBlock * kBlock;
    return std::clamp(fitting, kBlock, kChunk);
  }
};

// Some rows of one expert: `count` of them, sorted pairs from `start` on.
template <typename T>
struct Piece {
  const T* weights;
  int64_t start, count;
};

// Of a thread, kept from one call to the next: fresh memory would be handed out page by page each time.
template <typename T>
struct Scratch {
  std::vector<T> x, hidden;
  std::vector<float> sums;

  static Scratch& of_thread(const Layer<T>& layer) {
    static thread_local Scratch scratch;
    const auto rows = static_cast<size_t>(layer.chunk());
    scratch.x.resize(std::max(scratch.x.size(), rows * layer.depth()));
    scratch.hidden.resize(std::max(scratch.hidden.size(), rows * layer.inner()));
    scratch.sums.resize(kChunk * kPanel);
    return scratch;
  }
};

// Rows of `a` by a panel of `columns` into `sums`, rows kPanel apart. Of a deep panel a part at a time, which then stays
// in the second-level cache.
template <typename T>
void multiply(int64_t rows, int64_t depth, int64_t columns, const T* a, const T* panel, float* sums) {
  for (int64_t k = 0; k < depth; k += kDepth) {
    for (int64_t m = 0; m < rows; m += kBlock) {
      at::native::cpublas::brgemm(
          std::min(kBlock, rows - m), columns, std::min(kDepth, depth - k), depth, columns, kPanel, k > 0,
          a + m * depth + k, panel + k * columns, sums + m * kPanel, interleaved<T>);
    }
  }
}

template <typename T>
void gather(const Layer<T>& layer, const Piece<T>& piece, Scratch<T>& scratch) {
  for (int64_t i = 0; i < piece.count; ++i) {
    T* to = scratch.x.data() + i * layer.depth();
    std::memcpy(to, layer.x + layer.rows[piece.start + i] * layer.hidden, layer.hidden * sizeof(T));
    std::fill(to + layer.hidden, to + layer.depth(), T(0));
  }
}

// SiLU(x·W_gate) * (x·W_up) of panels [from, to), into `hidden`.
template <typename T>
void gate_and_up(
    const Layer<T>& layer, const Piece<T>& piece, int64_t from, int64_t to, Scratch<T>& scratch, T* hidden) {
  const Lanes one(1.0F);
  for (int64_t j = from; j < to; ++j) {
    const int64_t columns = std::min(kPanel, layer.first_columns() - j * kPanel), half = columns / 2;
    const int64_t wanted = std::min(half, layer.width - j * kHalf);
    const T* panel = piece.weights + j * kPanel * layer.depth();
    multiply(piece.count, layer.depth(), columns, scratch.x.data(), panel, scratch.sums.data());
    for (int64_t i = 0; i < piece.count; ++i) {
      const float* sums = scratch.sums.data() + i * kPanel;
      T* row = hidden + i * layer.inner();
      T* into = row + j * kHalf;
      Lanes each[2];
      for (int64_t k = 0; k < half / kLanes; ++k) {
        const Lanes gate = Lanes::loadu(sums + k * kLanes);
        each[k] = gate / (one + exponential(gate.neg(), into)) * Lanes::loadu(sums + half + k * kLanes);
      }
      store(into, each[0], each[1], wanted);
      if (j + 1 == layer.first_panels()) {
        std::fill(row + layer.width, row + layer.inner(), T(0));
      }
    }
  }
}

// hidden·W_down of panels [from, to), into the piece's results.
template <typename T>
void down(const Layer<T>& layer, const Piece<T>& piece, int64_t from, int64_t to, Scratch<T>& scratch, const T* hidden) {
  for (int64_t j = from; j < to; ++j) {
    const int64_t columns = std::min(kPanel, layer.last_columns() - j * kPanel);
    const int64_t wanted = std::min(columns, layer.hidden - j * kPanel);
    const T* panel = piece.weights + layer.first_columns() * layer.depth() + j * kPanel * layer.inner();
    multiply(piece.count, layer.inner(), columns, hidden, panel, scratch.sums.data());
    for (int64_t i = 0; i < piece.count; ++i) {
      const float* sums = scratch.sums.data() + i * kPanel;
      T* into = layer.y + (piece.start + i) * layer.hidden + j * kPanel;
      for (int64_t c = 0; c < wanted; c += 2 * kLanes) {
        store(into + c, Lanes::loadu(sums + c), Lanes::loadu(sums + c + kLanes), std::min(2 * kLanes, wanted - c));
      }
    }
  }
}

// `work(piece, part, scratch)` once for every one of both, by whichever thread is free.
template <typename T, typename Work>
void share_out(const Layer<T>& layer, int64_t pieces, int64_t parts, const Work& work) {
  std::atomic<int64_t> next{0};
  at::parallel_for(0, std::min<int64_t>(at::get_num_threads(), pieces * parts), 1, [&](int64_t, int64_t) {
    Scratch<T>& scratch = Scratch<T>::of_thread(layer);
    for (int64_t nth = next++; nth < pieces * parts; nth = next++) {
      work(nth / parts, nth % parts, scratch);
    }
    at::native::cpublas::brgemm_release(interleaved<T>);
  });
}

template <typename T>
void run(const Layer<T>& layer, std::vector<Piece<T>> pieces) {
  const auto size = static_cast<int64_t>(pieces.size());
  if (size == 0) {
    return;
  }
  // The longest first: who comes last then has little left to wait for.
  std::stable_sort(pieces.begin(), pieces.end(), [](const Piece<T>& a, const Piece<T>& b) { return a.count > b.count; });
  const int64_t wanted = at::get_num_threads() == 1 ? 1 : kPerThread * at::get_num_threads();
  if (size >= wanted) {
    share_out(layer, size, 1, [&](int64_t nth, int64_t, Scratch<T>& scratch) {
      gather(layer, pieces[nth], scratch);
      gate_and_up(layer, pieces[nth], 0, layer.first_panels(), scratch, scratch.hidden.data());
      down(layer, pieces[nth], 0, layer.last_panels(), scratch, scratch.hidden.data());
    });
    return;
  }
  const int64_t parts = (wanted + size - 1) / size;
  // Not by `vector`, which would fill it with zeros.
  const int64_t each = layer.chunk() * layer.inner();
  const std::unique_ptr<T[]> hidden(new T[size * each]);
  share_out(layer, size, parts, [&](int64_t nth, int64_t part, Scratch<T>& scratch) {
    const int64_t panels = layer.first_panels();
    gather(layer, pieces[nth], scratch);
    const int64_t from = panels * part / parts, to = panels * (part + 1) / parts;
    gate_and_up(layer, pieces[nth], from, to, scratch, hidden.get() + nth * each);
  });
  share_out(layer, size, parts, [&](int64_t nth, int64_t part, Scratch<T>& scratch) {
    const int64_t panels = layer.last_panels();
    const int64_t from = panels * part / parts, to = panels * (part + 1) / parts;
    down(layer, pieces[nth], from, to, scratch, hidden.get() + nth * each);
  });
}

template <typename T>
void fused_experts_of(
    const at::Tensor& x, const at::Tensor& rows, at::IntArrayRef counts, int64_t width, const at::Tensor& weights,
    at::Tensor& out) {
  Layer<T> layer{
      x.const_data_ptr<T>(), rows.const_data_ptr<int64_t>(), out.mutable_data_ptr<T>(), x.size(1), width};
  const int64_t each = layer.weights_of_expert();
  TORCH_CHECK(weights.size(1) == each, "weights of an expert must be ", each, " numbers, are ", weights.size(1));
  std::vector<Piece<T>> pieces;
  int64_t start = 0;
  for (size_t expert = 0; expert < counts.size(); ++expert) {
    const int64_t count = counts[expert], parts = (count + layer.chunk() - 1) / layer.chunk();
    for (int64_t part = 0; part < parts; ++part) {
      const int64_t from = count * part / parts, to = count * (part + 1) / parts;
      pieces.push_back({weights.const_data_ptr<T>() + expert * each, start + from, to - from});
    }
    start += count;
  }
  run(layer, std::move(pieces));
}

void fused_experts(
    const at::Tensor& x, const at::Tensor& rows, at::IntArrayRef counts, int64_t width, const at::Tensor& weights,
    at::Tensor& out) {
  const auto dtype = x.scalar_type();
  TORCH_CHECK(dtype == at::kFloat || dtype == at::kBFloat16, "dtype must be float32 or bfloat16, is ", dtype);
  TORCH_CHECK(weights.scalar_type() == dtype && out.scalar_type() == dtype, "dtypes must be the same");
  TORCH_CHECK(x.dim() == 2 && out.dim() == 2 && weights.dim() == 2 && rows.dim() == 1, "wrong number of dimensions");
  TORCH_CHECK(
      x.is_contiguous() && out.is_contiguous() && weights.is_contiguous() && rows.is_contiguous(), "not contiguous");
  TORCH_CHECK(rows.scalar_type() == at::kLong, "rows must be int64");
  TORCH_CHECK(width > 0 && width <= kLargest, "width must be 1 to ", kLargest, ", is ", width);
  TORCH_CHECK(x.size(1) > 0 && x.size(1) <= kLargest, "rows of x must have 1 to ", kLargest, " numbers");
  TORCH_CHECK(weights.size(0) == static_cast<int64_t>(counts.size()), "as many counts as experts");
  int64_t pairs = 0;
  for (const int64_t count : counts) {
    TORCH_CHECK(count >= 0 && count <= rows.numel() - pairs, "counts must be at least 0 and sizes fit together");
    pairs += count;
  }
  TORCH_CHECK(pairs == rows.numel() && pairs == out.size(0) && out.size(1) == x.size(1), "sizes must fit together");
  const int64_t* each = rows.const_data_ptr<int64_t>();
  TORCH_CHECK(
      std::all_of(each, each + pairs, [&](int64_t row) { return row >= 0 && row < x.size(0); }), "no such row of x");
  if (dtype == at::kFloat) {
    fused_experts_of<float>(x, rows, counts, width, weights, out);
  } else {
    fused_experts_of<BFloat16>(x, rows, counts, width, weights, out);
  }
}

} // namespace

TORCH_LIBRARY(gatewise, library) {
  library.def("fused_experts(Tensor x, Tensor rows, int[] counts, int width, Tensor weights, Tensor(a!) out) -> ()");
}

TORCH_LIBRARY_IMPL(gatewise, CPU, library) {
  library.impl("fused_experts", fused_experts);
}

// It has no derivative, and says so to forward-mode differentiation instead of losing a tangent.
TORCH_LIBRARY_IMPL(gatewise, Autograd, library) {
  library.impl("fused_experts", torch::autograd::autogradNotImplementedFallback());
}
