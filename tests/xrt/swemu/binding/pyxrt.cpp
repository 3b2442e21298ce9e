// A binding to XRT with the names and the behaviour of AMD's pyxrt of 2022.1.
//
// The traps are wanted, for code that works here must work there: a call of a kernel
// leaves out arguments that are neither a buffer nor a C int, floats among them; waiting
// and syncing hold the GIL; a mapping does not keep its buffer alive; there are no
// 64-bit scalars and no default arguments.
#include <pybind11/numpy.h>
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <string>

#include <xrt/xrt_bo.h>
#include <xrt/xrt_device.h>
#include <xrt/xrt_kernel.h>
#include <xrt/xrt_uuid.h>
#include <experimental/xrt_system.h>
#include <experimental/xrt_xclbin.h>

namespace py = pybind11;

namespace {

using Info = xrt::info::device;

template <Info key>
std::string text_of(const xrt::device& device) {
  const auto value = device.get_info<key>();
  using Value = std::decay_t<decltype(value)>;
  if constexpr (std::is_same_v<Value, std::string>)
    return value;
  else if constexpr (std::is_same_v<Value, xrt::uuid>)
    return value.to_string();
  else
    return std::to_string(value);
}

// Whatever the type of a property is, it arrives as a str.
std::string device_info(const xrt::device& device, Info key) {
  switch (key) {
    case Info::bdf: return text_of<Info::bdf>(device);
    case Info::interface_uuid: return text_of<Info::interface_uuid>(device);
    case Info::kdma: return text_of<Info::kdma>(device);
    case Info::max_clock_frequency_mhz:
      return text_of<Info::max_clock_frequency_mhz>(device);
    case Info::m2m: return text_of<Info::m2m>(device);
    case Info::name: return text_of<Info::name>(device);
    case Info::nodma: return text_of<Info::nodma>(device);
    case Info::offline: return text_of<Info::offline>(device);
    case Info::electrical: return text_of<Info::electrical>(device);
    case Info::thermal: return text_of<Info::thermal>(device);
    case Info::mechanical: return text_of<Info::mechanical>(device);
    case Info::memory: return text_of<Info::memory>(device);
    case Info::platform: return text_of<Info::platform>(device);
    case Info::pcie_info: return text_of<Info::pcie_info>(device);
    case Info::host: return text_of<Info::host>(device);
    case Info::dynamic_regions: return text_of<Info::dynamic_regions>(device);
    default: return "NA";
  }
}

// Starts a run with the arguments that fit; says nothing about the others.
xrt::run start_with(const xrt::kernel& kernel, const py::args& arguments) {
  xrt::run run(kernel);
  for (int index = 0; index < static_cast<int>(arguments.size()); ++index) {
    const py::handle argument = arguments[index];
    try {
      run.set_arg(index, argument.cast<xrt::bo>());
      continue;
    } catch (const std::exception&) {
    }
    try {
      run.set_arg(index, argument.cast<int>());
    } catch (const std::exception&) {
    }
  }
  run.start();
  return run;
}

void bind_enums(py::module_& module) {
  py::enum_<xclBOSyncDirection>(module, "xclBOSyncDirection")
      .value("XCL_BO_SYNC_BO_TO_DEVICE", XCL_BO_SYNC_BO_TO_DEVICE)
      .value("XCL_BO_SYNC_BO_FROM_DEVICE", XCL_BO_SYNC_BO_FROM_DEVICE)
      .value("XCL_BO_SYNC_BO_GMIO_TO_AIE", XCL_BO_SYNC_BO_GMIO_TO_AIE)
      .value("XCL_BO_SYNC_BO_AIE_TO_GMIO", XCL_BO_SYNC_BO_AIE_TO_GMIO);
  // ERT_CMD_STATE_RUNNING is missing there, too.
  py::enum_<ert_cmd_state>(module, "ert_cmd_state")
      .value("ERT_CMD_STATE_NEW", ERT_CMD_STATE_NEW)
      .value("ERT_CMD_STATE_QUEUED", ERT_CMD_STATE_QUEUED)
      .value("ERT_CMD_STATE_COMPLETED", ERT_CMD_STATE_COMPLETED)
      .value("ERT_CMD_STATE_ERROR", ERT_CMD_STATE_ERROR)
      .value("ERT_CMD_STATE_ABORT", ERT_CMD_STATE_ABORT)
      .value("ERT_CMD_STATE_SUBMITTED", ERT_CMD_STATE_SUBMITTED)
      .value("ERT_CMD_STATE_TIMEOUT", ERT_CMD_STATE_TIMEOUT)
      .value("ERT_CMD_STATE_NORESPONSE", ERT_CMD_STATE_NORESPONSE)
      .value("ERT_CMD_STATE_SKERROR", ERT_CMD_STATE_SKERROR)
      .value("ERT_CMD_STATE_SKCRASHED", ERT_CMD_STATE_SKCRASHED);
  py::enum_<Info>(module, "xrt_info_device")
      .value("bdf", Info::bdf)
      .value("interface_uuid", Info::interface_uuid)
      .value("kdma", Info::kdma)
      .value("max_clock_frequency_mhz", Info::max_clock_frequency_mhz)
      .value("m2m", Info::m2m)
      .value("name", Info::name)
      .value("nodma", Info::nodma)
      .value("offline", Info::offline)
      .value("electrical", Info::electrical)
      .value("thermal", Info::thermal)
      .value("mechanical", Info::mechanical)
      .value("memory", Info::memory)
      .value("platform", Info::platform)
      .value("pcie_info", Info::pcie_info)
      .value("host", Info::host)
      .value("dynamic_regions", Info::dynamic_regions);
}

void bind_device(py::module_& module) {
  py::class_<xrt::uuid>(module, "uuid")
      .def(py::init([](const std::string& text) { return xrt::uuid(text); }))
      .def("to_string", &xrt::uuid::to_string);
  py::class_<xrt::xclbin>(module, "xclbin")
      .def(py::init<const std::string&>())
      .def("get_xsa_name", &xrt::xclbin::get_xsa_name)
      .def("get_uuid", &xrt::xclbin::get_uuid)
      .def("get_kernels", &xrt::xclbin::get_kernels)
      .def("get_mems", &xrt::xclbin::get_mems);
  py::class_<xrt::xclbin::kernel>(module.attr("xclbin"), "xclbinkernel")
      .def("get_name", &xrt::xclbin::kernel::get_name)
      .def("get_num_args", &xrt::xclbin::kernel::get_num_args);
  py::class_<xrt::xclbin::mem>(module.attr("xclbin"), "xclbinmem")
      .def("get_tag", &xrt::xclbin::mem::get_tag)
      .def("get_base_address", &xrt::xclbin::mem::get_base_address)
      .def("get_size_kb", &xrt::xclbin::mem::get_size_kb)
      .def("get_used", &xrt::xclbin::mem::get_used);
  py::class_<xrt::device>(module, "device")
      .def(py::init<>())
      .def(py::init<unsigned int>())
      .def(py::init<const std::string&>())
      .def("load_xclbin", [](xrt::device& device, const std::string& path) {
        return device.load_xclbin(path);
      })
      .def("load_xclbin", [](xrt::device& device, const xrt::xclbin& xclbin) {
        return device.load_xclbin(xclbin);
      })
      .def("get_xclbin_uuid", &xrt::device::get_xclbin_uuid)
      .def("get_info", &device_info);
}

void bind_buffer(py::module_& module) {
  py::class_<xrt::bo> buffer(module, "bo");
  py::enum_<xrt::bo::flags>(buffer, "flags")
      .value("normal", xrt::bo::flags::normal)
      .value("cacheable", xrt::bo::flags::cacheable)
      .value("device_only", xrt::bo::flags::device_only)
      .value("host_only", xrt::bo::flags::host_only)
      .value("p2p", xrt::bo::flags::p2p)
      .value("svm", xrt::bo::flags::svm)
      .export_values();
  buffer
      .def(py::init<xrt::device, std::size_t, xrt::bo::flags, xrt::memory_group>())
      .def(py::init<xrt::bo, std::size_t, std::size_t>())
      .def("write", [](xrt::bo& self, const py::buffer& data, std::size_t seek) {
        const py::buffer_info info = data.request();
        self.write(info.ptr, info.itemsize * info.size, seek);
      })
      .def("read", [](xrt::bo& self, std::size_t num_bytes, std::size_t skip) {
        py::array_t<char> data(num_bytes);
        self.read(data.mutable_data(), num_bytes, skip);
        return data;
      })
      .def("sync", [](xrt::bo& self, xclBOSyncDirection direction,
                      std::size_t num_bytes, std::size_t offset) {
        self.sync(direction, num_bytes, offset);
      })
      .def("map", [](xrt::bo& self) {
        return py::memoryview::from_memory(self.map(), self.size());
      })
      .def("size", &xrt::bo::size)
      .def("address", &xrt::bo::address);
}

void bind_kernel(py::module_& module) {
  py::class_<xrt::kernel> kernel(module, "kernel");
  py::class_<xrt::run>(module, "run")
      .def(py::init<>())
      .def(py::init<const xrt::kernel&>())
      .def("start", [](xrt::run& self) { self.start(); })
      .def("set_arg",
           [](xrt::run& self, int index, xrt::bo& value) { self.set_arg(index, value); })
      .def("set_arg",
           [](xrt::run& self, int index, int value) { self.set_arg(index, value); })
      .def("wait", [](xrt::run& self) { return self.wait(0); })
      .def("wait", [](xrt::run& self, unsigned int timeout_ms) {
        return self.wait(timeout_ms);
      })
      .def("state", &xrt::run::state);
  using Access = xrt::kernel::cu_access_mode;
  py::enum_<Access>(kernel, "cu_access_mode")
      .value("exclusive", Access::exclusive)
      .value("shared", Access::shared)
      .value("none", Access::none)
      .export_values();
  kernel
      .def(py::init([](const xrt::device& device, const xrt::uuid& uuid,
                       const std::string& name, Access access) {
        return xrt::kernel(device, uuid, name, access);
      }))
      .def(py::init([](const xrt::device& device, const xrt::uuid& uuid,
                       const std::string& name) {
        return xrt::kernel(device, uuid, name);
      }))
      .def("__call__", &start_with)
      .def("group_id", &xrt::kernel::group_id);
}

}  // namespace

PYBIND11_MODULE(pyxrt, module) {
  module.doc() = "XRT's devices, buffers and kernels, as AMD's pyxrt has them.";
  module.def("enumerate_devices", [] { return xrt::system::enumerate_devices(); });
  bind_enums(module);
  bind_device(module);
  bind_buffer(module);
  bind_kernel(module);
}
