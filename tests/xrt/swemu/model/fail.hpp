// How the device ends on an error: by a signal. The runtime sees that and ends the
// host; it would wait for ever for a device that exits.
#pragma once

#include <cstdio>
#include <cstdlib>

template <typename... Args>
[[noreturn]] void fail(const char* format, Args... args) {
  std::fputs("device model: ", stderr);
  if constexpr (sizeof...(args) == 0)
    std::fputs(format, stderr);
  else
    std::fprintf(stderr, format, args...);
  std::fputc('\n', stderr);
  std::abort();
}
