// A matrix of weights, as a file has it and packed.

#pragma once

#include <cstdlib>
#include <memory>

#include "formats.h"

// A matrix [O, I] as a GGUF file has it; `type` is the file's number for its format.
struct FileMatrix {
  const uint8_t* rows;
  int64_t type, row_bytes, outputs, inputs;
};

// The same, packed: the panels one behind the other, each a line of `records`.
struct Matrix {
  int64_t type = 0, outputs = 0, record_bytes = 0, records = 0;
  std::unique_ptr<uint8_t, decltype(&std::free)> memory{nullptr, std::free};

  int64_t panels() const { return (outputs + kPanel - 1) / kPanel; }
  uint8_t* panel(int64_t number) const { return memory.get() + number * records * record_bytes; }
};

// Throws std::bad_alloc.
Matrix pack(const FileMatrix& from, int threads);
