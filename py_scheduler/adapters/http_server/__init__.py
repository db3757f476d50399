"""What backends share whose model is served by an inference server over HTTP, whichever that is."""
