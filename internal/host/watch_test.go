package host

import (
	"testing"
)

func TestWatching(t *testing.T) {
	w := newWatching()
	_, changed := w.now()
	w.set(false)
	select {
	case <-changed:
		t.Fatal("nothing has changed")
	default:
	}
	w.set(true)
	<-changed
	if on, _ := w.now(); !on {
		t.Error("it is off")
	}
}
