#include "parallel.hpp"

#include "export.hpp"

#if !defined(_WIN32)
#include <pthread.h>
#include <signal.h>
#endif

#include <atomic>
#include <condition_variable>
#include <exception>
#include <mutex>
#include <new>
#include <thread>

#if defined(__x86_64__) || defined(__i386__)
#include <immintrin.h>
#endif

namespace lowp {
namespace {

constexpr int kMostThreads = 256;
constexpr int kPiecesPerThread = 4;  // so that a thread paused by the system does not delay the others
constexpr int kSpins = 400;          // about ten microseconds: shorter than sleeping and waking up

inline void pause_briefly() {
#if defined(__x86_64__) || defined(__i386__)
  _mm_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

// While it lives, threads that are started inherit a full mask: signals go to the interpreter. Faults are not blocked, or
// no handler of them would run. Windows has no such masks, and no child that is a copy of its parent.
class SignalsBlocked {
#if !defined(_WIN32)
 public:
  SignalsBlocked() {
    sigset_t all;
    sigfillset(&all);
    for (const int fault : {SIGSEGV, SIGBUS, SIGILL, SIGFPE}) sigdelset(&all, fault);
    pthread_sigmask(SIG_BLOCK, &all, &before_);
  }
  ~SignalsBlocked() { pthread_sigmask(SIG_SETMASK, &before_, nullptr); }

 private:
  sigset_t before_;
#endif
};

struct Job {
  Body body;
  void* context;
  int64_t count;
  int64_t piece;
  std::atomic<int64_t> next{0};

  void work() {
    for (;;) {
      const int64_t begin = next.fetch_add(piece, std::memory_order_relaxed);
      if (begin >= count) return;
      body(context, begin, count - begin < piece ? count : begin + piece);
    }
  }
};

// Never destroyed: its threads sleep until the process ends, so that no thread is joined at interpreter shutdown.
class Pool {
 public:
  std::mutex in_use;  // held by the caller of the running job

  void run(Job& job, int helpers) {
    helpers = start(helpers);
    {
      std::lock_guard<std::mutex> lock(mutex_);
      job_ = &job;
      seats_ = helpers;
      working_.store(helpers, std::memory_order_relaxed);
      generation_.fetch_add(1, std::memory_order_release);
    }
    if (helpers > 0) wake_.notify_all();
    job.work();
    // Takes back seats without a worker: all work is distributed.
    std::unique_lock<std::mutex> lock(mutex_);
    working_.fetch_sub(seats_, std::memory_order_relaxed);
    seats_ = 0;
    job_ = nullptr;
    if (working_.load(std::memory_order_acquire) == 0) return;
    lock.unlock();
    for (int spin = 0; spin < kSpins; ++spin) {
      if (working_.load(std::memory_order_acquire) == 0) return;
      pause_briefly();
    }
    lock.lock();
    done_.wait(lock, [this] { return working_.load(std::memory_order_acquire) == 0; });
  }

 private:
  // Returns the number of helpers, at most `wanted`; fewer if the system gives no more threads or no memory for them.
  int start(int wanted) {
    if (started_ >= wanted) return wanted;
    [[maybe_unused]] SignalsBlocked blocked;
    try {
      for (; started_ < wanted; ++started_) std::thread([this] { serve(); }).detach();
    } catch (const std::exception&) {
    }
    return started_ < wanted ? started_ : wanted;
  }

  void serve() {
    uint64_t seen = 0;
    for (;;) {
      for (int spin = 0; spin < kSpins && generation_.load(std::memory_order_acquire) == seen; ++spin) pause_briefly();
      Job* job = nullptr;
      {
        std::unique_lock<std::mutex> lock(mutex_);
        wake_.wait(lock, [&] { return generation_.load(std::memory_order_relaxed) != seen; });
        seen = generation_.load(std::memory_order_relaxed);
        if (seats_ == 0) continue;
        --seats_;
        job = job_;
      }
      job->work();
      if (working_.fetch_sub(1, std::memory_order_acq_rel) == 1) {
        std::lock_guard<std::mutex> lock(mutex_);
        done_.notify_one();
      }
    }
  }

  std::mutex mutex_;
  std::condition_variable wake_, done_;
  std::atomic<uint64_t> generation_{0};
  std::atomic<int> working_{0};
  Job* job_ = nullptr;
  int seats_ = 0;
  int started_ = 0;  // accessed only by the holder of in_use
};

std::atomic<Pool*> the_pool{nullptr};

// GOMP_parallel(function, data, threads, flags): function(data) on a team of threads including the caller. 0 threads
// mean the number set by torch; a number different from the last one would end or start threads of the team.
using Team = void (*)(void (*)(void*), void*, unsigned, unsigned);

std::atomic<Team> the_team{nullptr};

void work_of(void* job) { static_cast<Job*>(job)->work(); }

#if !defined(_WIN32)
// The parent's threads do not exist in a child, but may hold its locks: the child discards both.
void forget_threads() {
  the_pool.store(nullptr, std::memory_order_release);
  the_team.store(nullptr, std::memory_order_release);
}

[[maybe_unused]] const int registered = pthread_atfork(nullptr, nullptr, &forget_threads);
#endif

Pool* pool() {
  Pool* found = the_pool.load(std::memory_order_acquire);
  if (found != nullptr) return found;
  Pool* fresh = new (std::nothrow) Pool;
  if (fresh != nullptr && !the_pool.compare_exchange_strong(found, fresh, std::memory_order_acq_rel)) {
    delete fresh;
    return found;
  }
  return fresh;
}

}  // namespace

void run_parallel(int64_t count, int64_t grain, int threads, Body body, void* context) {
  if (count <= 0) return;
  const int64_t grains = (count + grain - 1) / grain;
  if (threads > kMostThreads) threads = kMostThreads;
  if (threads > grains) threads = static_cast<int>(grains);
  if (threads <= 1) return body(context, 0, count);
  Pool* shared = pool();
  if (shared == nullptr) return body(context, 0, count);
  std::unique_lock<std::mutex> lock(shared->in_use, std::try_to_lock);
  if (!lock.owns_lock()) return body(context, 0, count);
  const int64_t pieces = static_cast<int64_t>(threads) * kPiecesPerThread;
  Job job;
  job.body = body;
  job.context = context;
  job.count = count;
  job.piece = (grains + pieces - 1) / pieces * grain;
  if (const Team team = the_team.load(std::memory_order_acquire)) return team(&work_of, &job, 0, 0);
  shared->run(job, threads - 1);
}

}  // namespace lowp

// The address of GOMP_parallel in the OpenMP runtime whose threads to use; null: the library's own pool.
LOWP_EXPORT void lowp_set_team(void* parallel) {
  lowp::the_team.store(reinterpret_cast<lowp::Team>(parallel), std::memory_order_release);
}
