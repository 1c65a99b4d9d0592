"""Tables, figures and pages made of scored records."""
