// What jaxinf uses of AMD's pyxrt of 2022.1, which systems without a card do not have.
//
// The traps are wanted, for code that works here must work there: syncing holds the GIL;
// a mapping does not keep its buffer alive; an argument is a buffer or a C int; there
// are no default arguments.
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <string>

#include <xrt/xrt_bo.h>
#include <xrt/xrt_device.h>
#include <xrt/xrt_kernel.h>
#include <xrt/xrt_uuid.h>
#include <experimental/xrt_xclbin.h>

namespace py = pybind11;

PYBIND11_MODULE(pyxrt, module) {
  py::enum_<xclBOSyncDirection>(module, "xclBOSyncDirection")
      .value("XCL_BO_SYNC_BO_TO_DEVICE", XCL_BO_SYNC_BO_TO_DEVICE)
      .value("XCL_BO_SYNC_BO_FROM_DEVICE", XCL_BO_SYNC_BO_FROM_DEVICE);
  // ERT_CMD_STATE_RUNNING is missing there, too.
  py::enum_<ert_cmd_state>(module, "ert_cmd_state")
      .value("ERT_CMD_STATE_NEW", ERT_CMD_STATE_NEW)
      .value("ERT_CMD_STATE_QUEUED", ERT_CMD_STATE_QUEUED)
      .value("ERT_CMD_STATE_COMPLETED", ERT_CMD_STATE_COMPLETED)
      .value("ERT_CMD_STATE_ERROR", ERT_CMD_STATE_ERROR);

  py::class_<xrt::uuid>(module, "uuid");
  py::class_<xrt::xclbin>(module, "xclbin")
      .def(py::init<const std::string&>())
      .def("get_kernels", &xrt::xclbin::get_kernels);
  py::class_<xrt::xclbin::kernel>(module.attr("xclbin"), "xclbinkernel")
      .def("get_name", &xrt::xclbin::kernel::get_name);
  py::class_<xrt::device>(module, "device")
      .def(py::init<unsigned int>())
      .def(py::init<const std::string&>())
      .def("load_xclbin", [](xrt::device& device, const xrt::xclbin& xclbin) {
        return device.load_xclbin(xclbin);
      });

  py::class_<xrt::bo> buffer(module, "bo");
  py::enum_<xrt::bo::flags>(buffer, "flags")
      .value("normal", xrt::bo::flags::normal)
      .value("p2p", xrt::bo::flags::p2p)
      .export_values();
  buffer
      .def(py::init<xrt::device, std::size_t, xrt::bo::flags, xrt::memory_group>())
      .def(py::init<xrt::bo, std::size_t, std::size_t>())
      .def("sync", [](xrt::bo& self, xclBOSyncDirection direction,
                      std::size_t num_bytes, std::size_t offset) {
        self.sync(direction, num_bytes, offset);
      })
      .def("map", [](xrt::bo& self) {
        return py::memoryview::from_memory(self.map(), self.size());
      })
      .def("size", &xrt::bo::size);

  py::class_<xrt::kernel>(module, "kernel")
      .def(py::init([](const xrt::device& device, const xrt::uuid& uuid,
                       const std::string& name) {
        return xrt::kernel(device, uuid, name);
      }))
      .def("group_id", &xrt::kernel::group_id);
  py::class_<xrt::run>(module, "run")
      .def(py::init<const xrt::kernel&>())
      .def("start", [](xrt::run& self) { self.start(); })
      .def("set_arg",
           [](xrt::run& self, int index, xrt::bo& value) { self.set_arg(index, value); })
      .def("set_arg",
           [](xrt::run& self, int index, int value) { self.set_arg(index, value); })
      .def("state", &xrt::run::state);
}
