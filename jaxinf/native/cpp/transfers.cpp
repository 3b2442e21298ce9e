// Many short pieces between files and memory, in one call from Python.
#include <fcntl.h>
#include <sys/stat.h>
#include <sys/uio.h>
#include <unistd.h>

#include <cstdint>
#include <cstring>

namespace jaxinf_transfers {

constexpr std::int64_t page_bytes = 4096;

struct Piece {
  std::int64_t memory;  // its address, on a page; whole pages are there for it
  std::int64_t offset;  // in the file, on a page
  std::int64_t num_bytes;
};

// Whether a file is long enough for a write of whole pages.
inline bool has_room(int file, std::int64_t end) {
  struct stat status;
  return fstat(file, &status) == 0 && status.st_size >= end;
}

// Bytes moved, whole pages; -1 unless all is as it mostly is.
inline std::int64_t moved(int file, const Piece& piece, bool writes) {
  char* const memory = (char*)piece.memory;
  const std::int64_t end = (piece.num_bytes + page_bytes - 1) / page_bytes * page_bytes;
  if (writes && end != piece.num_bytes) {
    if (!has_room(file, piece.offset + end)) return -1;
    std::memset(memory + piece.num_bytes, 0, (size_t)(end - piece.num_bytes));
  }
  std::int64_t done = 0;
  while (done < end) {
    const struct iovec rest = {memory + done, (size_t)(end - done)};
    const ssize_t num = writes ? pwritev(file, &rest, 1, piece.offset + done)
                               : preadv(file, &rest, 1, piece.offset + done);
    if (num <= 0) break;
    done += num;
    if (num % page_bytes) break;
  }
  return done >= (writes ? end : piece.num_bytes) ? done : -1;
}

}  // namespace jaxinf_transfers

#ifndef JAXINF_ENTRY
#define JAXINF_ENTRY jaxinf_entry
#endif

// Moves pieces one after another by direct I/O. `paths`: one a piece, each ended by a
// zero; `done`: gets the bytes that were moved of each, or -1 where something is
// unusual: the caller then moves that piece itself, and finds out.
extern "C" __attribute__((visibility("default"))) int JAXINF_ENTRY(
    std::int64_t num, int writes, const char* paths,
    const jaxinf_transfers::Piece* pieces, std::int64_t* done) {
  const int flags = (writes ? O_WRONLY : O_RDONLY) | O_DIRECT | O_CLOEXEC | O_NOFOLLOW;
  for (std::int64_t i = 0; i < num; ++i, paths += std::strlen(paths) + 1) {
    const int file = open(paths, flags);
    if (file < 0) {
      done[i] = -1;
      continue;
    }
    done[i] = jaxinf_transfers::moved(file, pieces[i], writes != 0);
    if (close(file) != 0) done[i] = -1;
  }
  return 0;
}
