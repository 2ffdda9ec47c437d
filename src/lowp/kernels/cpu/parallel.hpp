// Distribution of work over the threads of torch's OpenMP runtime, or of the library's own pool if that is unknown.
//
// torch's threads spin for milliseconds after each operation, on cores that other threads would need. The library is
// built without OpenMP, so that there is no second runtime beside torch's: it receives the address of the runtime's
// function. The number of threads is an argument of every call (it follows torch.set_num_threads). A call made while
// another one runs, from a second Python thread or from inside a body, runs only on the calling thread. After a fork the
// child uses a new pool, since OpenMP's threads do not survive. Workers of the pool sleep when there is no work.
#pragma once

#include <cstdint>
#include <type_traits>

namespace lowp {

using Body = void (*)(void* context, int64_t begin, int64_t end);

// Calls body(context, begin, end) for parts that cover 0 .. count, on up to `threads` threads including the caller. Every
// begin is a multiple of `grain`. The assignment of parts to threads is not determined. Returns when all parts are done.
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
