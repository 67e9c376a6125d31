// Running one function on several threads at once.
#pragma once

#include <thread>
#include <vector>

// The thread pool of the process, which torch uses too, if it is GNU's or has its interface: a second pool would spin on
// the same cores. A weak symbol: if it is missing, threads are made for the call.
extern "C" void GOMP_parallel(void (*)(void*), void*, unsigned, unsigned) __attribute__((weak));

namespace kvframe {

inline void run_on_threads(void (*work)(void*), void* argument, int num_threads) {
  if (num_threads <= 1) {
    work(argument);
  } else if (GOMP_parallel) {
    GOMP_parallel(work, argument, (unsigned)num_threads, 0);
  } else {
    std::vector<std::thread> others;
    for (int i = 1; i < num_threads; i++) others.emplace_back(work, argument);
    work(argument);
    for (std::thread& other : others) other.join();
  }
}

}  // namespace kvframe
