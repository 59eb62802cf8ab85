"""Other model servers, set up outside the repository and measured with the same load as Charonia."""
