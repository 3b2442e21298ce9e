// The interface of hls::stream as documented by Vitis HLS (UG1399, "HLS Stream Library"):
// enough to compile a kernel as its synthesiser would, with nothing to link.
#pragma once

namespace hls {

template <class T, int depth = 0>
class stream {
 public:
  stream();
  explicit stream(const char* name);
  T read();
  void read(T& value);
  bool read_nb(T& value);
  void write(const T& value);
  bool write_nb(const T& value);
  bool empty() const;
  bool full() const;

 private:
  stream(const stream&);
  stream& operator=(const stream&);
};

}  // namespace hls
