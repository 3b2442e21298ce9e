// Prints what an xclbin says, as the vendor's own header reads it.
#include <cstdint>
#include <cstdio>
#include <fstream>
#include <iterator>
#include <string>
#include <uuid/uuid.h>

#include <xclbin.h>

int main(int, char** arguments) {
  std::ifstream file(arguments[1], std::ios::binary);
  const std::string bytes(std::istreambuf_iterator<char>(file), {});
  const auto* top = reinterpret_cast<const axlf*>(bytes.data());
  const axlf_header& header = top->m_header;
  std::printf("%s signature %d length %s mode %u platform %s sections %u\n",
              top->m_magic, top->m_signature_length,
              header.m_length == bytes.size() ? "right" : "wrong", header.m_mode,
              header.m_platformVBNV, header.m_numSections);
  for (unsigned i = 0; i < header.m_numSections; ++i) {
    const axlf_section_header& section = top->m_sections[i];
    const char* body = bytes.data() + section.m_sectionOffset;
    std::printf("section %u aligned %d\n", section.m_sectionKind,
                section.m_sectionOffset % 8 == 0);
    if (section.m_sectionKind == BITSTREAM)
      std::printf("  %s\n", std::string(body, section.m_sectionSize).c_str());
    if (section.m_sectionKind == MEM_TOPOLOGY) {
      const auto* memory = reinterpret_cast<const mem_topology*>(body);
      for (int j = 0; j < memory->m_count; ++j) {
        const mem_data& one = memory->m_mem_data[j];
        std::printf("  ddr4 %d used %d KiB %lu base %lu tag %s\n",
                    one.m_type == MEM_DDR4, one.m_used, one.m_size,
                    one.m_base_address, one.m_tag);
      }
    }
    if (section.m_sectionKind == IP_LAYOUT) {
      const auto* layout = reinterpret_cast<const ip_layout*>(body);
      for (int j = 0; j < layout->m_count; ++j) {
        const ip_data& one = layout->m_ip_data[j];
        std::printf("  kernel %d %s base 0x%lx interrupt %u enabled %u control %u\n",
                    one.m_type == IP_KERNEL, one.m_name, one.m_base_address,
                    (one.properties & IP_INTERRUPT_ID_MASK) >> IP_INTERRUPT_ID_SHIFT,
                    one.properties & IP_INT_ENABLE_MASK,
                    (one.properties & IP_CONTROL_MASK) >> IP_CONTROL_SHIFT);
      }
    }
    if (section.m_sectionKind == CONNECTIVITY) {
      const auto* all = reinterpret_cast<const ::connectivity*>(body);
      for (int j = 0; j < all->m_count; ++j) {
        const connection& one = all->m_connection[j];
        std::printf("  argument %d of %d in %d\n", one.arg_index,
                    one.m_ip_layout_index, one.mem_data_index);
      }
    }
  }
}
