"""XRT's software emulation without a card and without the card's development tools."""
