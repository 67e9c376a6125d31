// Paged attention on a CPU, and writes of keys and values into pages: the functions with C linkage that `attention.py`
// and `write.py` call. `reference.py` defines attention.
#include <type_traits>

#include "decode.h"
#include "threads.h"
#include "tiles.h"
#include "write.h"

namespace kvframe {

template <class Stored>
void run_part(const Step& step, Plan& plan, Scratch& scratch, const Part& part) {
  bool decodes = plan.units[part.unit].kv_head < 0;
#if defined(KVFRAME_AVX512) && defined(__AVX512BF16__)
  if constexpr (std::is_same_v<Stored, BFloat16>) {
    if (step.query_dtype == kBFloat16 && step.head_size % 2 == 0) {
      if (decodes) {
        Decode<Stored, PairKeys<Stored>>(step, plan, scratch, part).run();
        return;
      }
#if defined(KVFRAME_AMX)
      if (MatrixProduct::is_permitted()) {
        MatrixProduct::Registers registers;
        Tiles<Stored, MatrixProduct>(step, plan, scratch, part).run();
        return;
      }
#endif
      Tiles<Stored, PairProduct>(step, plan, scratch, part).run();
      return;
    }
  }
#endif
  if (decodes) {
    Decode<Stored, FloatKeys<Stored>>(step, plan, scratch, part).run();
    return;
  }
  Tiles<Stored, FloatProduct>(step, plan, scratch, part).run();
}

struct Job {
  const Step& step;
  Plan& plan;
};

void work(void* argument) {
  static thread_local Scratch scratch;
  Job& job = *static_cast<Job*>(argument);
  int count = (int)job.plan.parts.size();
  for (int index; (index = job.plan.next.fetch_add(1, std::memory_order_relaxed)) < count;) {
    const Part& part = job.plan.parts[index];
    switch (job.step.stored_dtype) {
      case kFloat32: run_part<Float32>(job.step, job.plan, scratch, part); break;
      case kBFloat16: run_part<BFloat16>(job.step, job.plan, scratch, part); break;
      case kFloat16: run_part<Float16>(job.step, job.plan, scratch, part); break;
      case kFloat8: run_part<Float8>(job.step, job.plan, scratch, part); break;
      case kInt8: run_part<Int8>(job.step, job.plan, scratch, part); break;
      default: run_part<Nibble>(job.step, job.plan, scratch, part); break;
    }
  }
}

}  // namespace kvframe

extern "C" void kvframe_attention(const kvframe::Step* step) {
  using namespace kvframe;
  static thread_local Plan plan;
  plan.make(*step, kMaxTileRows);
  // Padded tokens belong to no request.
  int item = step->query_dtype == kFloat32 ? 4 : 2;
  int64_t row = step->num_heads * step->head_size_v * item, end = step->query_start_loc[step->num_reqs];
  std::memset(step->output + end * row, 0, (size_t)((step->num_tokens - end) * row));
  Job job{*step, plan};
  run_on_threads(work, &job, std::min((int)step->num_threads, (int)plan.parts.size()));
}

extern "C" void kvframe_write(const kvframe::Write* write) {
  using namespace kvframe;
  WriteJob job{*write};
  int64_t portions = (write->num_tokens + kWriteTokens - 1) / kWriteTokens;
  run_on_threads(work_on_write, &job, (int)std::min(write->num_threads, portions));
}

// The floats of a vector: shows which of the variants was built.
extern "C" int kvframe_lanes() { return kvframe::kLanes; }

// Whether products of bfloat16 are computed by the processor's matrix unit.
extern "C" int kvframe_matrix_unit() {
#if defined(KVFRAME_AMX)
  return kvframe::MatrixProduct::is_permitted();
#else
  return 0;
#endif
}
