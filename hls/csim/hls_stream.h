// hls::stream for plain g++: a FIFO of the same depth as on a card.
//
// A read from an empty one, or a write to a full one, lets the region's other stages run:
// see region.hpp. It has the members of the vendor's class that the kernels use.
#pragma once

#include "region.hpp"

namespace hls {

template <class T, int depth = 0>
class stream;

template <class T>
class stream<T, 0> {
 public:
  stream(const stream&) = delete;
  stream& operator=(const stream&) = delete;

  bool empty() const { return size_ == 0; }
  bool full() const { return size_ == capacity_; }
  int size() const { return size_; }

  T read() {
    while (empty()) jaxinf::csim::Region::wait("read from an empty stream");
    const T value = places_[first_];
    first_ = first_ + 1 == capacity_ ? 0 : first_ + 1;
    --size_;
    jaxinf::csim::Region::moved();
    return value;
  }

  void write(const T& value) {
    while (full()) jaxinf::csim::Region::wait("write to a full stream");
    const int last = first_ + size_;
    places_[last < capacity_ ? last : last - capacity_] = value;
    ++size_;
    jaxinf::csim::Region::moved();
  }

 protected:
  stream(T* places, int capacity) : places_(places), capacity_(capacity) {}
  ~stream() {
    if (!empty()) jaxinf::csim::stop("a stream still holds %d values\n", size_);
  }

 private:
  T* places_;
  const int capacity_;
  int first_ = 0, size_ = 0;
};

template <class T, int depth>
class stream : public stream<T, 0> {
 public:
  stream() : stream<T, 0>(memory_, depth) {}

 private:
  T memory_[depth];
};

}  // namespace hls
