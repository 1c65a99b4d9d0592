"""Speed and equality of the engines, measured on the machine at hand."""
