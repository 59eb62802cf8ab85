"""Other model servers beside Charonia, set up from package indexes: measured, and Triton compared call by call."""
