// Many short pieces between files and memory, in one call from Python.
//
//   pieces ─► windows of a few MiB ─► open, io_submit ─► io_getevents, close
//                   └─ long pieces, and those that were refused: preadv, pwritev
#include <fcntl.h>
#include <linux/aio_abi.h>
#include <sys/syscall.h>
#include <sys/uio.h>
#include <unistd.h>

#include <atomic>
#include <cerrno>
#include <cstdint>
#include <cstring>

namespace jaxinf_transfers {

constexpr std::int64_t page_bytes = 4096;

struct Piece {
  std::int64_t memory;  // address of its whole pages, a multiple of the page
  std::int64_t offset;  // in the file, a multiple of the page
  std::int64_t num_bytes;
};

// Whether a file is long enough for a write of whole pages.
inline bool has_room(int file, std::int64_t end) {
  return lseek(file, 0, SEEK_END) >= end;
}

inline std::int64_t whole_pages(std::int64_t num_bytes) {
  return (num_bytes + page_bytes - 1) / page_bytes * page_bytes;
}

// Fills a piece's last page with zeros; false if the file ends before that page's end.
inline bool padded(int file, const Piece& piece) {
  const std::int64_t end = whole_pages(piece.num_bytes);
  if (end == piece.num_bytes) return true;
  if (!has_room(file, piece.offset + end)) return false;
  std::memset((char*)piece.memory + piece.num_bytes, 0,
              (size_t)(end - piece.num_bytes));
  return true;
}

// Returns the fewest bytes that count as a complete transfer.
inline std::int64_t least(const Piece& piece, bool writes) {
  return writes ? whole_pages(piece.num_bytes) : piece.num_bytes;
}

// Moves a piece; returns the bytes moved, or -1 if the transfer is not complete.
inline std::int64_t moved(int file, const Piece& piece, bool writes) {
  const std::int64_t end = whole_pages(piece.num_bytes);
  std::int64_t done = 0;
  while (done < end) {
    const struct iovec rest = {(char*)piece.memory + done, (size_t)(end - done)};
    const ssize_t num = writes ? pwritev(file, &rest, 1, piece.offset + done)
                               : preadv(file, &rest, 1, piece.offset + done);
    if (num <= 0) break;
    done += num;
    if (num % page_bytes) break;
  }
  return done >= least(piece, writes) ? done : -1;
}

// ---- pieces in flight together

constexpr std::int64_t window_bytes = 4 << 20;
constexpr int window_pieces = 64;

// Contexts of asynchronous I/O. They are kept for the next caller, because making one
// takes as long as a few requests, and destroying one takes even longer.
constexpr int num_kept = 16;
inline std::atomic<aio_context_t> kept_contexts[num_kept];

class Context {
 public:
  Context() {
    for (auto& kept : kept_contexts)
      if ((id_ = kept.exchange(0))) return;
    if (syscall(SYS_io_setup, window_pieces, &id_) != 0) id_ = 0;
  }
  ~Context() {
    if (!id_) return;
    for (auto& kept : kept_contexts) {
      aio_context_t none = 0;
      if (kept.compare_exchange_strong(none, id_)) return;
    }
    syscall(SYS_io_destroy, id_);
  }
  Context(const Context&) = delete;
  Context& operator=(const Context&) = delete;

  // Returns how many requests, from the first on, the kernel has accepted.
  int submit(int num, struct iocb** requests) const {
    int taken = 0;
    while (id_ && taken < num) {
      const long more =
          syscall(SYS_io_submit, id_, (long)(num - taken), requests + taken);
      if (more > 0) taken += (int)more;
      else if (errno != EINTR) break;
    }
    return taken;
  }

  // Waits for all accepted requests, so that the caller may use their memory again.
  void wait(int num, struct io_event* events) const {
    for (int done = 0; done < num;) {
      const long more = syscall(SYS_io_getevents, id_, 1L, (long)(num - done),
                                events + done, nullptr);
      if (more > 0) done += (int)more;
    }
  }

 private:
  aio_context_t id_ = 0;
};

// Pieces of a window, each with its open file; negative if the piece is left to the caller.
struct Window {
  const Piece* pieces;
  int* files;
  std::int64_t* done;
  int num;
};

// Moves pieces at once, and those that the kernel refuses one after another.
inline void move_together(const Window& window, bool writes) {
  struct iocb requests[window_pieces];
  struct iocb* waiting[window_pieces];
  struct io_event events[window_pieces];
  int num = 0;
  for (int i = 0; i < window.num; ++i) {
    if (window.files[i] < 0) continue;
    struct iocb& request = requests[num];
    std::memset(&request, 0, sizeof request);
    request.aio_data = (std::uint64_t)i;
    request.aio_lio_opcode = writes ? IOCB_CMD_PWRITE : IOCB_CMD_PREAD;
    request.aio_fildes = (std::uint32_t)window.files[i];
    request.aio_buf = (std::uint64_t)window.pieces[i].memory;
    request.aio_nbytes = (std::uint64_t)whole_pages(window.pieces[i].num_bytes);
    request.aio_offset = window.pieces[i].offset;
    waiting[num++] = &request;
  }
  const Context context;
  const int taken = num > 1 ? context.submit(num, waiting) : 0;
  context.wait(taken, events);
  for (int k = 0; k < taken; ++k) window.done[events[k].data] = events[k].res;
  for (int i = 0; i < window.num; ++i)
    if (window.files[i] >= 0 && window.done[i] < least(window.pieces[i], writes))
      window.done[i] = moved(window.files[i], window.pieces[i], writes);
}

}  // namespace jaxinf_transfers

#ifndef JAXINF_ENTRY
#define JAXINF_ENTRY jaxinf_entry
#endif

// Moves pieces by direct I/O. `paths`: one for each piece, each ended by a zero. `done`
// receives the bytes moved of each piece, or -1 if something was unusual; the caller then
// moves that piece itself, and gets the error.
extern "C" __attribute__((visibility("default"))) int JAXINF_ENTRY(
    std::int64_t num, int writes, const char* paths,
    const jaxinf_transfers::Piece* pieces, std::int64_t* done) {
  using namespace jaxinf_transfers;
  const int flags = (writes ? O_WRONLY : O_RDONLY) | O_DIRECT | O_CLOEXEC | O_NOFOLLOW |
                    O_NONBLOCK;  // a pipe in a file's place is not waited for
  int files[window_pieces];
  for (std::int64_t first = 0; first < num;) {
    const Window window = {pieces + first, files, done + first, 0};
    int count = 0;
    std::int64_t bytes = 0;
    for (; first < num && count < window_pieces; ++count, ++first) {
      bytes += pieces[first].num_bytes;
      if (count && bytes > window_bytes) break;
      files[count] = open(paths, flags);
      done[first] = -1;
      if (files[count] >= 0 && writes && !padded(files[count], pieces[first])) {
        close(files[count]);
        files[count] = -1;
      }
      paths += std::strlen(paths) + 1;
    }
    move_together({window.pieces, files, window.done, count}, writes != 0);
    for (int i = 0; i < count; ++i)
      if (files[i] >= 0 && close(files[i]) != 0) window.done[i] = -1;
  }
  return 0;
}
