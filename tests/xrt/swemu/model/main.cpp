// The process that XRT's software emulation starts for each device it opens.
//
// The host listens on a Unix socket; this process connects and answers one request
// after another. It ends with the host, or by a signal.
#include <fcntl.h>
#include <poll.h>
#include <signal.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

#include <cerrno>
#include <chrono>
#include <cstdint>
#include <cstring>
#include <string>
#include <thread>

#include "device.hpp"
#include "fail.hpp"

namespace {

// `09 <u64 body length> 15 <u32 request>`, of which a reply has the first 9 bytes.
constexpr unsigned kRequestHeader = 14, kReplyHeader = 9;
constexpr char kLengthTag = 0x09, kRequestTag = 0x15;

std::string setting(const char* name) {
  const char* value = std::getenv(name);
  if (!value || !*value) fail("%s is not set", name);
  return value;
}

int connect_to_host() {
  const std::string path =
      "/tmp/" + setting("USER") + "/" + setting("EMULATION_SOCKETID");
  sockaddr_un address{};
  address.sun_family = AF_UNIX;
  if (path.size() >= sizeof address.sun_path) fail("too long: %s", path.c_str());
  std::memcpy(address.sun_path, path.c_str(), path.size());
  const int socket_fd = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0);
  const auto deadline = std::chrono::steady_clock::now() + std::chrono::seconds(60);
  while (connect(socket_fd, reinterpret_cast<sockaddr*>(&address), sizeof address)) {
    if (std::chrono::steady_clock::now() > deadline)
      fail("no host at %s: %s", path.c_str(), std::strerror(errno));
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
  }
  return socket_fd;
}

// Without a host there is nothing to do and nobody to tell.
void wait_for_data(int socket_fd, pid_t host) {
  pollfd entry{socket_fd, POLLIN, 0};
  for (;;) {
    const int ready = poll(&entry, 1, 500);
    if (ready > 0) return;
    if (ready < 0 && errno != EINTR) fail("poll: %s", std::strerror(errno));
    if (getppid() != host) _exit(1);
  }
}

void read_exactly(int socket_fd, pid_t host, char* bytes, std::size_t num_bytes) {
  while (num_bytes) {
    wait_for_data(socket_fd, host);
    const ssize_t got = read(socket_fd, bytes, num_bytes);
    if (got == 0 || (got < 0 && errno == ECONNRESET)) _exit(1);
    if (got < 0 && errno == EINTR) continue;
    if (got < 0) fail("read from the host: %s", std::strerror(errno));
    bytes += got;
    num_bytes -= static_cast<std::size_t>(got);
  }
}

void write_exactly(int socket_fd, const char* bytes, std::size_t num_bytes) {
  while (num_bytes) {
    const ssize_t sent = send(socket_fd, bytes, num_bytes, MSG_NOSIGNAL);
    if (sent < 0 && (errno == EPIPE || errno == ECONNRESET)) _exit(1);
    if (sent < 0 && errno == EINTR) continue;
    if (sent < 0) fail("write to the host: %s", std::strerror(errno));
    bytes += sent;
    num_bytes -= static_cast<std::size_t>(sent);
  }
}

void send_reply(int socket_fd, const Reply& reply) {
  const std::uint64_t length = reply.body().size();
  char header[kReplyHeader] = {kLengthTag};
  std::memcpy(header + 1, &length, sizeof length);
  write_exactly(socket_fd, header, sizeof header);
  write_exactly(socket_fd, reply.body().data(), length);
}

void serve(int socket_fd, pid_t host) {
  Device device;
  std::string body;
  for (bool closed = false; !closed;) {
    char header[kRequestHeader];
    read_exactly(socket_fd, host, header, sizeof header);
    if (header[0] != kLengthTag || header[9] != kRequestTag)
      fail("a request begins with bytes that are no header");
    std::uint64_t length;
    std::uint32_t request;
    std::memcpy(&length, header + 1, sizeof length);
    std::memcpy(&request, header + 10, sizeof request);
    body.resize(length);
    read_exactly(socket_fd, host, body.data(), length);
    const Reply reply = device.answer(request, Message(body), closed);
    send_reply(socket_fd, reply);
    if (closed) _exit(0);  // a kernel that still runs is not waited for
  }
}

}  // namespace

int main() {
  const pid_t host = getppid();
  signal(SIGINT, SIG_IGN);  // Ctrl-C is the host's to handle
  const rlimit no_core{0, 0};
  setrlimit(RLIMIT_CORE, &no_core);
  close_range(3, ~0U, 0);  // the host's files, sockets of other devices among them
  if (setting("VITIS_SW_EMU_ENABLE_SINGLE_MMAP") == "0")
    fail("VITIS_SW_EMU_ENABLE_SINGLE_MMAP must be 1: all buffers are in one file");
  serve(connect_to_host(), host);
}
