// What XLA gives to a handler: a stream, arrays on the device, and attributes.
#ifndef JAXINF_STREAM_CALL_H_
#define JAXINF_STREAM_CALL_H_

#include <cstring>

#include "stream_memory.h"
#include "xla/ffi/api/c_api.h"

namespace jaxinf_stream {

struct Call {
  XLA_FFI_CallFrame* frame;
  Stream stream = nullptr;
  std::int64_t queue = -1, port = -1, site = -1, result_bytes = 0;

  XLA_FFI_Error* error(XLA_FFI_Error_Code code, const char* text) const {
    char whole[2 * text_bytes];
    std::snprintf(whole, sizeof whole, "jaxinf: %s", text);
    XLA_FFI_Error_Create_Args arguments = {};
    arguments.struct_size = XLA_FFI_Error_Create_Args_STRUCT_SIZE;
    arguments.message = whole;
    arguments.errc = code;
    return frame->api->XLA_FFI_Error_Create(&arguments);
  }

  void read_attribute(const char* name, std::int64_t& value) const {
    const XLA_FFI_Attrs& given = frame->attrs;
    for (std::int64_t n = 0; n < given.size; ++n) {
      const XLA_FFI_ByteSpan& own = *given.names[n];
      const bool is_it = own.len == std::strlen(name) &&
                         !std::memcmp(own.ptr, name, own.len) &&
                         given.types[n] == XLA_FFI_AttrType_SCALAR;
      if (!is_it) continue;
      const auto* scalar = static_cast<const XLA_FFI_Scalar*>(given.attrs[n]);
      if (scalar->dtype == XLA_FFI_DataType_S64)
        value = *static_cast<const std::int64_t*>(scalar->value);
    }
  }

  XLA_FFI_Error* read() {
    read_attribute("queue", queue);
    read_attribute("port", port);
    read_attribute("site", site);
    read_attribute("result_bytes", result_bytes);
    if (queue < 0 || port < 0)
      return error(XLA_FFI_Error_Code_INVALID_ARGUMENT,
                   "expected the int64 attributes queue and port");
    XLA_FFI_Stream_Get_Args arguments = {};
    arguments.struct_size = XLA_FFI_Stream_Get_Args_STRUCT_SIZE;
    arguments.ctx = frame->ctx;
    if (XLA_FFI_Error* none = frame->api->XLA_FFI_Stream_Get(&arguments)) return none;
    stream = static_cast<Stream>(arguments.stream);
    return nullptr;
  }
};

// Tells XLA which version of its interface this is; whether that was the question.
inline bool is_metadata(XLA_FFI_CallFrame* frame) {
  XLA_FFI_Extension_Base* extension = frame->extension_start;
  if (!extension || extension->type != XLA_FFI_Extension_Metadata) return false;
  auto* found = reinterpret_cast<XLA_FFI_Metadata_Extension*>(extension)->metadata;
  found->api_version.major_version = XLA_FFI_API_MAJOR;
  found->api_version.minor_version = XLA_FFI_API_MINOR;
  found->traits = 0;  // no part of a command buffer, which would replay the copies alone
  return true;
}

inline std::size_t bytes_of(const XLA_FFI_Buffer& buffer) {
  std::size_t count = 1;
  for (std::int64_t n = 0; n < buffer.rank; ++n) count *= buffer.dims[n];
  switch (buffer.dtype) {
    case XLA_FFI_DataType_PRED:
    case XLA_FFI_DataType_S8:
    case XLA_FFI_DataType_U8:
      return count;
    case XLA_FFI_DataType_S16:
    case XLA_FFI_DataType_U16:
    case XLA_FFI_DataType_F16:
    case XLA_FFI_DataType_BF16:
      return 2 * count;
    case XLA_FFI_DataType_S64:
    case XLA_FFI_DataType_U64:
    case XLA_FFI_DataType_F64:
      return 8 * count;
    default:
      return 4 * count;
  }
}

inline const XLA_FFI_Buffer& buffer(void* given) {
  return *static_cast<const XLA_FFI_Buffer*>(given);
}

inline Address address(const void* memory) {
  return reinterpret_cast<std::uintptr_t>(memory);
}

}  // namespace jaxinf_stream

#endif  // JAXINF_STREAM_CALL_H_
