"""From a call to launches: validate, plan, run, differentiate; imports frontend and codegen, never the reverse."""
