// The protocol buffer wire format, as far as the emulation's messages use it.
#pragma once

#include <cstdint>
#include <cstring>
#include <string>
#include <string_view>
#include <vector>

#include "fail.hpp"

// A received message; its byte strings are views of the buffer it was parsed from.
class Message {
 public:
  explicit Message(std::string_view body) {
    while (!body.empty()) fields_.push_back(take_field(body));
  }

  std::uint64_t number(unsigned field) const { return find(field).number; }
  std::string_view bytes(unsigned field) const { return find(field).bytes; }

 private:
  enum WireType { kVarint = 0, kFixed64 = 1, kBytes = 2, kFixed32 = 5 };
  struct Field {
    unsigned id = 0;
    std::uint64_t number = 0;
    std::string_view bytes;
  };

  static std::string_view take(std::string_view& body, std::uint64_t num_bytes) {
    if (num_bytes > body.size()) fail("a message ends within a field");
    const std::string_view taken = body.substr(0, num_bytes);
    body.remove_prefix(num_bytes);
    return taken;
  }

  static std::uint64_t take_varint(std::string_view& body) {
    std::uint64_t value = 0;
    for (unsigned shift = 0; shift < 64; shift += 7) {
      const auto byte = static_cast<unsigned char>(take(body, 1)[0]);
      value |= static_cast<std::uint64_t>(byte & 0x7f) << shift;
      if (!(byte & 0x80)) return value;
    }
    fail("a number of a message has more than 64 bits");
  }

  static std::uint64_t take_fixed(std::string_view& body, unsigned num_bytes) {
    std::uint64_t value = 0;  // this processor is little-endian, and so is the format
    std::memcpy(&value, take(body, num_bytes).data(), num_bytes);
    return value;
  }

  static Field take_field(std::string_view& body) {
    const std::uint64_t tag = take_varint(body);
    Field field;
    field.id = static_cast<unsigned>(tag >> 3);
    switch (tag & 7) {
      case kVarint: field.number = take_varint(body); break;
      case kFixed64: field.number = take_fixed(body, 8); break;
      case kFixed32: field.number = take_fixed(body, 4); break;
      case kBytes: field.bytes = take(body, take_varint(body)); break;
      default: fail("a message has a field of wire type %d", int(tag & 7));
    }
    return field;
  }

  // An optional field that is not there reads as zero, or as no bytes.
  Field find(unsigned field) const {
    for (const Field& one : fields_)
      if (one.id == field) return one;
    return {};
  }

  std::vector<Field> fields_;
};

// A message to be sent.
class Reply {
 public:
  Reply& number(unsigned field, std::uint64_t value) {
    put_varint(field << 3);
    put_varint(value);
    return *this;
  }

  Reply& bytes(unsigned field, std::string_view value) {
    put_varint(field << 3 | 2);
    put_varint(value.size());
    body_.append(value);
    return *this;
  }

  const std::string& body() const { return body_; }

 private:
  void put_varint(std::uint64_t value) {
    for (; value >= 0x80; value >>= 7) body_.push_back(char(value | 0x80));
    body_.push_back(char(value));
  }

  std::string body_;
};
