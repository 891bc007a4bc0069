"""What every training run does, whatever it trains: its flags, its loop, how it is gone on with."""
