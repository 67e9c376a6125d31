// Running one function on several threads at once.
#pragma once

#include <thread>
#include <vector>

// Runs a function in the threads of the process's OpenMP library, which torch uses too: a second pool would spin on the
// same cores. The symbol is weak: libraries without GNU's interface lack it, and threads are then made for each call.
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
