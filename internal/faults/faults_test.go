package faults

import (
	"errors"
	"io"
	"testing"
)

func TestList(t *testing.T) {
	var l List
	l.If(false, "not this")
	l.Add(nil)
	if err := l.Err(); err != nil {
		t.Errorf("without a fault: %v", err)
	}
	l.If(true, "%d is below 0", -1)
	l.Add(io.EOF)
	if err := l.Err(); err == nil || err.Error() != "-1 is below 0\nEOF" || !errors.Is(err, io.EOF) {
		t.Errorf("%v", err)
	}
}
