package control

// Watch asks a worker for a [Timeline] of each step whose number Every divides. 0 asks for no more.
type Watch struct {
	Every int
}

// Timeline says what a worker did in a step. All times but Began are microseconds since then.
type Timeline struct {
	Step   int
	Began  int64 // microseconds since 1970
	Commit int64 // when it entered the commit
	End    int64 // of the step
	Spans  []Span
	Cut    bool // there were more than MaxSpans
}

// Span is one pass of a micro-batch through the layers from Layer on.
type Span struct {
	Backward     bool
	Layer, Micro int
	From, To     int64
	Wait         int64 // of it, for parameters that had not come
}

// MaxSpans bounds Timeline.Spans.
const MaxSpans = 4096

func (Watch) kind() string    { return "watch" }
func (Timeline) kind() string { return "timeline" }
