// The handlers of stream_calls.cpp for XLA on a CPU, with the late device's streams.
//
// A CPU has no streams: what depends on a handler's arrays would run when it returns. So
// each call is a future, which ends when the stream has come to its end; XLA keeps the
// arrays until then.
#include <atomic>

#include "xla/ffi/api/c_api.h"

extern "C" {
void* late_device_stream(int device);
void late_device_put(void* stream, void (*work)(void*), void* data);
}

namespace {

constexpr int max_devices = 64;
std::atomic<void*> streams[max_devices];
XLA_FFI_Handler *start, *finish;

int device_of(XLA_FFI_CallFrame* frame) {
  XLA_FFI_DeviceOrdinal_Get_Args given = {};
  given.struct_size = XLA_FFI_DeviceOrdinal_Get_Args_STRUCT_SIZE;
  given.ctx = frame->ctx;
  XLA_FFI_Error* error = frame->api->XLA_FFI_DeviceOrdinal_Get(&given);
  if (!error) return given.device_ordinal;
  XLA_FFI_Error_Destroy_Args destroyed = {};
  destroyed.struct_size = XLA_FFI_Error_Destroy_Args_STRUCT_SIZE;
  destroyed.error = error;
  frame->api->XLA_FFI_Error_Destroy(&destroyed);
  return 0;
}

thread_local void* stream;

XLA_FFI_Error* stream_of(XLA_FFI_Stream_Get_Args* given) {
  given->stream = stream;
  return nullptr;
}

struct Future {
  const XLA_FFI_Api* api;
  XLA_FFI_Future* future;
};

void end(void* given) {
  auto* future = static_cast<Future*>(given);
  XLA_FFI_Future_SetAvailable_Args done = {};
  done.struct_size = XLA_FFI_Future_SetAvailable_Args_STRUCT_SIZE;
  done.future = future->future;
  future->api->XLA_FFI_Future_SetAvailable(&done);
  delete future;
}

XLA_FFI_Error* run(XLA_FFI_CallFrame* frame, XLA_FFI_Handler* handler) {
  if (frame->extension_start) return handler(frame);  // XLA asks for the version
  const int device = device_of(frame);
  if (!streams[device]) streams[device] = late_device_stream(device);
  stream = streams[device];
  XLA_FFI_Api api = *frame->api;
  api.XLA_FFI_Stream_Get = stream_of;
  XLA_FFI_CallFrame own = *frame;
  own.api = &api;
  if (XLA_FFI_Error* error = handler(&own)) return error;
  XLA_FFI_Future_Create_Args made = {};
  made.struct_size = XLA_FFI_Future_Create_Args_STRUCT_SIZE;
  if (XLA_FFI_Error* error = frame->api->XLA_FFI_Future_Create(&made)) return error;
  frame->future = made.future;
  late_device_put(stream, end, new Future{frame->api, made.future});
  return nullptr;
}

}  // namespace

extern "C" {

void late_device_use(XLA_FFI_Handler* start_, XLA_FFI_Handler* finish_) {
  start = start_;
  finish = finish_;
}

XLA_FFI_Error* late_device_start(XLA_FFI_CallFrame* frame) { return run(frame, start); }

XLA_FFI_Error* late_device_finish(XLA_FFI_CallFrame* frame) {
  return run(frame, finish);
}

}
