// Work shared among the threads of torch's OpenMP runtime, or of a pool of our own where it has none that is known.
//
// torch's threads spin for milliseconds after each of its operations, on cores that threads of ours would need. The
// library itself is built without OpenMP, so that there is no second runtime beside torch's: it is given the address of
// the runtime's own function. The number of threads comes with every call (it follows torch.set_num_threads). A call
// made while another one runs, be it from a second Python thread or from inside a body, runs on the calling thread
// alone. After fork the child has a fresh pool of its own, since OpenMP's threads do not survive. Workers of the pool
// sleep when there is no work.
#pragma once

#include <cstdint>
#include <type_traits>

namespace lowp {

using Body = void (*)(void* context, int64_t begin, int64_t end);

// Calls body(context, begin, end) for pieces that cover 0 .. count, on up to `threads` threads, the caller among them.
// Every begin is a multiple of `grain`. Which thread gets which piece is not determined. Returns when all is done.
// A body must not throw.
void run_parallel(int64_t count, int64_t grain, int threads, Body body, void* context);

// The same for anything callable as body(begin, end).
template <class F>
void parallel_for(int64_t count, int64_t grain, int threads, F&& body) {
  struct Call {
    static void run(void* context, int64_t begin, int64_t end) {
      (*static_cast<std::remove_reference_t<F>*>(context))(begin, end);
    }
  };
  run_parallel(count, grain, threads, &Call::run, const_cast<void*>(static_cast<const void*>(&body)));
}

}  // namespace lowp
